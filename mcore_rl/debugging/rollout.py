"""`mcore-rl debug rollout`: the first batch of a run, generated and graded without trainer ranks."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from mcore_rl.config.rules.judge import has_judge_engines
from mcore_rl.config.rules.models import uses_lora, uses_reward_model
from mcore_rl.config.rules.objective import chosen_objective
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError, RewardError
from mcore_rl.observe.batch_view import print_batch
from mcore_rl.observe.progress import start_up_log
from mcore_rl.observe.report.run_files import json_lines
from mcore_rl.observe.terminal_text import visible
from mcore_rl.observe.third_party import ThirdPartyLog, third_party_log
from mcore_rl.ports import Collector
from mcore_rl.runtime.output import own_stderr
from mcore_rl.runtime.stops import STOPS
from mcore_rl.verbs import Start, local_files, locked

FOLDER = "debug_rollout"
"""Folder of run.dir with the records and logs of this command, so that it does not disturb a run there."""
STEP = 1
"""The first step: a run that starts with the same weights has the same prompts and seeds there."""


def debug_rollout(config: Config) -> int:
    """Generate and grade one batch with the weights of model.hf_path, and print it.

    Returns 0.
    Raises: ConfigError, DataError as `train`; RewardError, after the batch has been printed, if as many responses could
    not be graded as would end a run.
    """
    # No metrics are recorded, so neither the packages of trackers nor a network for them are needed.
    config.observe.trackers, config.observe.prometheus_port = [], 0
    # First, since config.yaml in run.dir has the commits of names on the hub.
    with local_files(config, start_up_log()):
        config.run.dir = str(Path(config.run.dir) / FOLDER)
        with own_stderr(), STOPS.listening(), third_party_log() as log:
            return locked(config, partial(_generate, config, log), trains=False, sends_weights=False)


def _generate(config: Config, log: ThirdPartyLog, start: Start) -> int:
    from mcore_rl.assembly import assemble_rollout
    from mcore_rl.data.records import remove_unjoined
    from mcore_rl.preparation.prepare import prepare
    from mcore_rl.preparation.run_dir import make_log_folder, open_run_dir

    show = start.show
    check_supported(config)
    prepared = prepare(config)
    if not prepared.data.prompts:
        raise ConfigError(
            f"{chosen_objective(config)} generates no responses; set trainer.objective=rl and "
            "algorithm.policy_loss.name to another loss than sft"
        )
    # First the run directory itself, so that it is private if it is new.
    open_run_dir(replace(config.run, dir=str(Path(config.run.dir).parent)))
    directory = open_run_dir(config.run)
    start.take_lock()
    records = directory / "rollouts"
    records.mkdir(exist_ok=True)
    remove_unjoined(records)
    logs = make_log_folder(directory)
    log.begin(logs)
    for line in prepared.lines:
        show(str(line))
    with assemble_rollout(config, prepared, logs, show) as collector:
        counts = config.trainer.prompts_per_step, config.rollout.samples_per_prompt
        show(f"generating {counts[0]} prompts x {counts[1]} responses with the weights of model.hf_path")
        failure = collect(collector)
    show_records(records / f"step_{STEP}.jsonl", Console(highlight=False))
    if failure is not None:
        raise failure
    return 0


def collect(collector: Collector) -> RewardError | None:
    """Generate the batch. Returns the error if too many responses could not be graded; they are recorded then, too."""
    try:
        collector.collect(STEP)
    except RewardError as error:
        return error
    return None


def check_supported(config: Config) -> None:
    """Reject runs whose weights or models are not available without trainer ranks.

    Raises: ConfigError naming the key.
    """
    if config.model.random_init:
        raise ConfigError(
            "model.random_init=true: debug rollout generates with the weights in model.hf_path; set it to false"
        )
    if uses_lora(config.actor) and config.actor.lora.path is not None:
        raise ConfigError(
            f"actor.lora.path={config.actor.lora.path}: debug rollout generates with the weights in model.hf_path "
            "alone; set it to null, or model.hf_path to a checkpoint with the merged adapter"
        )
    if not config.cluster.uses_cuda:
        return
    # These models use the GPUs of trainer ranks.
    own = {
        "reward_model.hf_path": uses_reward_model(config.reward_model),
        "judge.hf_path": has_judge_engines(config.judge),
    }
    if keys := [key for key, is_used in own.items() if is_used]:
        raise ConfigError(
            f"{' and '.join(keys)}: debug rollout starts no model on GPUs besides the rollout engines; set it to null "
            "(judge.url may name a judge server)"
        )


def show_records(path: Path, console: Console) -> None:
    """Print the batch in a rollout file, and the path of the file."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without UTF-8 cannot show texts in other scripts.
        sys.stdout.reconfigure(errors="replace")
    notes: list[str] = []
    print_batch(json_lines(path, notes), console)
    for line in (*notes, f"all responses: {path}"):
        console.print(visible(line), soft_wrap=True)
    # An error that follows goes to stderr, which is not buffered.
    console.file.flush()
