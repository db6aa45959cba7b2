"""Commands `mcore-rl serve`, which serves the policy of a run without training it, and `mcore-rl chat`, which talks to
it."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.config.episodes import SERVING, EpisodeConfig
from mcore_rl.config.rules.objective import chosen_objective
from mcore_rl.config.schema import Config
from mcore_rl.config.staleness import StalenessConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.gateway.wire import FILE
from mcore_rl.runtime.output import own_stderr
from mcore_rl.runtime.stops import STOPS
from mcore_rl.verbs import Start, ThirdPartyLog, locked, third_party_log

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageParam

LOOK_SECONDS = 0.5
TOKEN = "OPENAI_API_KEY"
QUIT = ("/quit", "/exit")


def serve(config: Config) -> int:
    """Serve the newest checkpoint in run.dir, or model.hf_path if there is none, until a signal ends it. Returns the
    exit code."""
    # Of the keys for episodes, only the address and the limits of the gateway matter here.
    ours, defaults = config.rollout, EpisodeConfig()
    config.rollout = replace(
        ours,
        **{name: getattr(defaults, name) for name in ("episode_kwargs", "environment", "harness", "harness_files")},
        # An asynchronous run would begin to generate for its next step.
        **asdict(StalenessConfig()),
        episode=SERVING,
        tools=None,
        history="new_sequence",
        long_history="end",
    )
    config.observe.trackers, config.observe.prometheus_port = [], 0
    with own_stderr(), STOPS.listening(), third_party_log() as log:
        try:
            return locked(config, partial(_serve_locked, config, log), trains=False)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 0


def _serve_locked(config: Config, log: ThirdPartyLog, start: Start) -> int:
    from mcore_rl.assembly import assemble
    from mcore_rl.preparation.prepare import prepare
    from mcore_rl.preparation.run_dir import make_log_folder, open_run_dir
    from mcore_rl.runtime.phases import Phase
    from mcore_rl.runtime.publisher import SlicePublisher
    from mcore_rl.runtime.roles.trainer import TrainerGroup
    from mcore_rl.trainer.checkpoints import check_newest
    from mcore_rl.trainer.run import Run, load_policy

    prepared = prepare(config)
    if not prepared.data.prompts:
        raise ConfigError(f"{chosen_objective(config)} has no engines; set trainer.objective=rl to serve the model")
    directory = open_run_dir(config.run)
    start.take_lock()
    check_newest(directory)
    logs = make_log_folder(directory)
    log.begin(logs)
    with assemble(config, prepared, logs, start.show) as run:
        assert isinstance(run, Run)
        assert isinstance(run.actor, TrainerGroup)
        assert isinstance(run.publisher, SlicePublisher)
        load_policy(run)
        run.publisher.publish(run.state.version)
        with run.actor.stages.stage(phase=Phase.GENERATE):
            _announce(directory, run.state.step)
        while True:  # the watch raises when a signal arrives, or a process dies that cannot be restarted
            run.actor.watch.wait([], 0)
            run.publisher.supply_restarted()
            time.sleep(LOOK_SECONDS)


def _announce(directory: Path, step: int) -> None:
    """Print the addresses, for shells."""
    gateways = json.loads((directory / FILE).read_text(encoding="utf-8"))
    print(f"serving the weights of step {step}; Ctrl-C ends it. For clients:")
    for gateway in gateways:
        print(f"  export OPENAI_BASE_URL={gateway['url']}/v1 OPENAI_API_KEY={gateway['token']}")
    print(f"  mcore-rl chat {directory}", flush=True)


def chat(where: str, system: str | None, max_tokens: int | None) -> int:
    """Talk to a served model, line by line. `where`: run directory or URL. Returns the exit code.

    Raises: ConfigError if no server is there.
    """
    import openai

    url, key = _server(where)
    client = openai.OpenAI(base_url=url, api_key=key)
    messages: list[ChatCompletionMessageParam] = [] if system is None else [{"role": "system", "content": system}]
    try:
        model = client.models.list().data[0].id
    except openai.OpenAIError as error:
        raise ConfigError(f"{url} does not answer: {error}; start `mcore-rl serve` first") from None
    print(f"{model}; an empty line starts anew, {QUIT[0]} ends", file=sys.stderr)
    first = len(messages)
    while (line := _line()) is not None:
        if not line:
            del messages[first:]
            continue
        messages.append({"role": "user", "content": line})
        try:
            said = _reply(client, model, messages, max_tokens)
        except openai.OpenAIError as error:
            messages.pop()
            print(f"error: {error}", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": said})
    return 0


def _reply(client: OpenAI, model: str, messages: list[ChatCompletionMessageParam], max_tokens: int | None) -> str:
    """Print the reply to a conversation as it arrives; return it."""
    said = ""
    for part in client.chat.completions.create(model=model, messages=messages, max_tokens=max_tokens, stream=True):
        text = (part.choices[0].delta.content or "") if part.choices else ""
        said += text
        print(text, end="", flush=True)
    print(flush=True)
    return said


def _line() -> str | None:
    """Read a line; None at the end of the input."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if line in QUIT else line


def _server(where: str) -> tuple[str, str]:
    """Return base URL and key of a server."""
    if where.startswith(("http://", "https://")):
        key = os.environ.get(TOKEN)
        if not key:
            raise ConfigError(f"{where}: set the environment variable {TOKEN} to the key that `mcore-rl serve` printed")
        return where.rstrip("/"), key
    file = Path(where) / FILE
    if not file.exists():
        raise ConfigError(f"{file} does not exist: nothing serves {where}; start `mcore-rl serve {where}` first")
    gateway = json.loads(file.read_text(encoding="utf-8"))[0]
    return f"{gateway['url']}/v1", gateway["token"]
