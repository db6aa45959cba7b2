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

from mcore_rl.config.episodes import SERVING
from mcore_rl.config.reward import NO_RULE
from mcore_rl.config.rules.objective import chosen_objective, trains_scores
from mcore_rl.config.rules.rollout import TOOL_KEYS
from mcore_rl.config.schema import Config, RolloutConfig
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
"""Interval of looks for lost engines and for restarted engines that are up."""
TOKEN = "OPENAI_API_KEY"
QUIT = ("/quit", "/exit")
PROMPTS = Path(__file__).with_name("serving_prompts.jsonl")
"""Prompts of a served policy. No temporary file, which would be left behind when the isolated run replaces the
process."""
TRAINING = (
    *("reward", "judge", "algorithm", "preference", "critic", "reference", "teacher", "reward_model", "trainer"),
    *("checkpoint", "observe"),
)
"""Sections that only training needs."""
OF_EPISODES = (
    *("samples_per_prompt", "keep_sampling_mask", "episode_kwargs", "environment", "harness", "harness_files"),
    *("long_history", "tools"),
    *(name for name in TOOL_KEYS if name != "tool_parser"),  # requests may have tools
)
"""Keys of section rollout that only training, or episodes other than single requests, need."""


def serve(config: Config, step: int | None = None) -> int:
    """Serve a checkpoint in run.dir, until a signal ends it. `step`: None for the newest one, or model.hf_path if there
    is none. Returns the exit code."""
    with own_stderr(), STOPS.listening(), third_party_log() as log:
        keep_served(config, PROMPTS)
        try:
            return locked(config, partial(_serve_locked, config, step, log), trains=False)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 0


def keep_served(config: Config, prompts: Path) -> None:
    """Reset the keys that a served policy does not depend on: its data, graders and other models need not exist here.

    prompts: file with a row, because engines are set up with prompts.

    Raises: ConfigError for a run whose model generates no text.
    """
    if trains_scores(config):
        raise ConfigError(f"{chosen_objective(config)} trains a model that generates no text; name another run")
    for name in TRAINING:
        setattr(config, name, type(getattr(config, name))())
    config.reward.function, config.observe.trackers = NO_RULE, []
    config.actor.moe.router_replay = "none"  # nobody needs the experts, and journals do not have them
    defaults, data = RolloutConfig(), config.data
    config.rollout = replace(
        config.rollout,
        **{name: getattr(defaults, name) for name in OF_EPISODES},
        # An asynchronous run would begin to generate for its next step.
        **asdict(StalenessConfig()),
        episode=SERVING,
        history="new_sequence",
    )
    config.data = replace(
        type(data)(),
        **{name: getattr(data, name) for name in ("template", "plain_template", "system_prompt", "template_kwargs")},
        train=[str(prompts)],
        long_prompts="truncate_left",
    )


def _serve_locked(config: Config, step: int | None, log: ThirdPartyLog, start: Start) -> int:
    from mcore_rl.assembly import assemble
    from mcore_rl.preparation.prepare import prepare
    from mcore_rl.preparation.run_dir import make_log_folder, open_run_dir
    from mcore_rl.runtime.phases import Phase
    from mcore_rl.runtime.publisher import SlicePublisher
    from mcore_rl.runtime.roles.trainer import TrainerGroup
    from mcore_rl.trainer.checkpoints import check_step
    from mcore_rl.trainer.run import Run, load_policy

    prepared = prepare(config)
    directory = open_run_dir(config.run)
    start.take_lock()
    check_step(directory, step)
    logs = make_log_folder(directory)
    log.begin(logs)
    with assemble(config, prepared, logs, start.show) as run:
        assert isinstance(run, Run)
        assert isinstance(run.actor, TrainerGroup)
        assert isinstance(run.publisher, SlicePublisher)
        load_policy(run, step)
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
