"""`mcore-rl debug train`: the update of a recorded step, repeated without engines and graders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from mcore_rl.config import load_config
from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.observe import TRAJECTORIES
from mcore_rl.config.rules.objective import chosen_objective
from mcore_rl.config.run_configs import CONFIG_FILE
from mcore_rl.config.schema import Config
from mcore_rl.debugging.repeated_metrics import compare, recorded_metrics, show_metrics, write_metrics
from mcore_rl.errors import ConfigError
from mcore_rl.observe.terminal_text import visible
from mcore_rl.observe.third_party import ThirdPartyLog, third_party_log
from mcore_rl.runtime.output import own_stderr
from mcore_rl.runtime.stops import STOPS
from mcore_rl.verbs import Start, locked

FOLDER = "debug_train"
"""Folder of run.dir with the results and logs of this command, so that the files of the run stay as they are."""
KEY = "observe.keep_trajectories"


def debug_train(directory: Path, step: int, overrides: Sequence[str]) -> int:
    """Repeat the update of a step of the run in `directory`, and print its metrics beside the recorded ones.

    The run's last start determines the configuration; `overrides` change it.

    Returns 0, also if metrics differ.
    Raises: ConfigError, DataError, DamagedCheckpointError if the step cannot be repeated; errors of the update.
    """
    config = _configuration(directory, overrides)
    with own_stderr(), STOPS.listening(), third_party_log() as log:
        return locked(config, partial(_repeat, config, step, overrides, log), trains=False, generates=False)


def _configuration(directory: Path, overrides: Sequence[str]) -> Config:
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(f"{directory} is no run: it has no {CONFIG_FILE}; name a run.dir")
    if given := [each for each in overrides if each.startswith("run.dir=")]:
        raise ConfigError(f"{given[0]}: debug train writes to {directory / FOLDER}; leave run.dir out")
    config = load_config(str(directory / CONFIG_FILE), overrides)
    if is_supervised(config.algorithm):
        raise ConfigError(f"{chosen_objective(config)} trains on no responses, so there is no step to repeat")
    # The directory may have been moved since.
    config.run.dir = str(directory)
    # No metrics are recorded for others, so neither the packages of trackers nor a network for them are needed.
    config.observe.trackers, config.observe.prometheus_port = [], 0
    return config


def _repeat(
    config: Config,
    step: int,
    overrides: Sequence[str],
    log: ThirdPartyLog,
    start: Start,  # the directory exists, so `locked` has taken its lock
) -> int:
    from mcore_rl.data.kept_steps.reader import read_step

    directory = Path(config.run.dir)
    checkpoint = start_of(directory, step)
    kept = read_step(directory / TRAJECTORIES, step)
    recorded = recorded_metrics(directory, step)
    # Imports follow the checks that do not need them, so that errors are reported at once.
    from mcore_rl.assembly import assemble_update
    from mcore_rl.preparation.prepare import prepare_models
    from mcore_rl.preparation.run_dir import make_log_folder, open_run_dir

    config.run.dir, config.observe.keep_trajectories = str(directory / FOLDER), 0
    models = prepare_models(config)
    target = open_run_dir(config.run)
    logs = make_log_folder(target)
    log.begin(logs)
    weights = "the initial weights" if checkpoint is None else f"checkpoints/{checkpoint.name}"
    start.show(f"repeating step {step} from {weights}, with {len(kept.responses.group_ids)} responses")
    with assemble_update(config, models, logs, start.show) as (repetition, store):
        if checkpoint is not None:
            repetition.load(checkpoint)
        values = repetition.repeat(kept.groups(store(kept.trajectories)), step, kept.version)
    metrics, console = compare(recorded, values), Console(highlight=False)
    path = write_metrics(target, step, overrides, metrics)
    show_metrics(step, metrics, console)
    console.print(visible(f"all digits: {path}"), soft_wrap=True)
    return 0


def start_of(directory: Path, step: int) -> Path | None:
    """Return the checkpoint before a kept step; None for step 1, which starts with the initial weights.

    Raises: ConfigError with the steps that can be repeated; DamagedCheckpointError.
    """
    from mcore_rl.data.kept_steps.writers import kept_steps
    from mcore_rl.trainer.checkpoints import Checkpoints
    from mcore_rl.trainer.proof import check_content, read_proof

    kept, checkpoints = kept_steps(directory / TRAJECTORIES), dict(Checkpoints(directory / "checkpoints", 1).complete())
    if not kept:
        raise ConfigError(
            f"{directory} has no trajectories of a step; set {KEY} to the number of steps whose trajectories "
            "training keeps"
        )
    repeatable = [each for each in kept if each == 1 or each - 1 in checkpoints]
    can = f"steps that can be repeated: {', '.join(map(str, repeatable)) or 'none'}"
    if step not in kept:
        raise ConfigError(
            f"{directory} has no trajectories of step {step}; {can}. {KEY} sets the number of last steps that are kept"
        )
    if step not in repeatable:
        raise ConfigError(
            f"{directory} has no checkpoint of step {step - 1}, from whose weights step {step} starts; {can}. "
            "checkpoint.every_steps and checkpoint.keep_last set the checkpoints that are kept"
        )
    if step == 1:
        return None
    check_content(checkpoints[step - 1], read_proof(checkpoints[step - 1]))
    return checkpoints[step - 1]
