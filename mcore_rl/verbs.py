"""Implementation of the command line's verbs: prepare, assemble, run, report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mcore_rl.config.fields import urls_of
from mcore_rl.config.reading.remote_names import is_url
from mcore_rl.config.schema import Config, TrainerConfig
from mcore_rl.errors import ConfigError, McoreRLError, RunDirLostError
from mcore_rl.observe.progress import start_up_log
from mcore_rl.observe.third_party import ThirdPartyLog, third_party_log
from mcore_rl.remote.localize import LocalNames, Show, localized, with_remote_names
from mcore_rl.remote.storage import has_export, uploaded
from mcore_rl.resumption import resume_hint
from mcore_rl.runtime.output import own_stderr
from mcore_rl.runtime.stops import STOPS

if TYPE_CHECKING:
    from mcore_rl.ports import Actor

Result = TypeVar("Result")
CANNOT_RUN = 3
"""Exit code of `plan` if the configuration fits but this version cannot run it."""


def train(config: Config, advice: str) -> int:
    """Start the run, or resume from run.dir, and print a summary of the training. `advice`: how to resume the run,
    printed at the start and if the run ends early.

    Returns the exit code; if a signal stopped the run early, Stops.exit_code().
    """
    run_dir = Path(config.run.dir)
    # The block includes the imports of other modules, since they print warnings too.
    with own_stderr(), STOPS.listening(lambda: resume_hint(run_dir, advice)), third_party_log() as log:
        try:
            start = partial(_train_locked, config, advice, log)
            was_finished = is_finished(run_dir, config.trainer)
            finished = was_finished or locked(config, start, trains=True)
        except KeyboardInterrupt:
            print(f"stopped: {resume_hint(run_dir, advice)}", file=sys.stderr)
            return STOPS.exit_code()
        except McoreRLError as error:
            _describe_failure(run_dir, advice, error)
            raise
    if not finished:
        print(_report(run_dir), file=sys.stderr)
        print(f"stopped on request: {resume_hint(run_dir, advice)}", flush=True)
        return STOPS.exit_code()
    # Imported late: numpy would delay the message about a mistyped key.
    from mcore_rl.observe.metrics import read_metrics
    from mcore_rl.observe.summary import summary_table

    print(summary_table(read_metrics(run_dir / "metrics.jsonl")))
    print(f"run directory: {config.run.dir}")
    print(_report(run_dir, keep=was_finished))
    print(f"Hugging Face model: {_export_hint(config, run_dir)}")
    return 0


def _describe_failure(run_dir: Path, advice: str, error: McoreRLError) -> None:
    """Write the error and the report of a run that failed after a step; print the report's path and how to resume."""
    # Invalid input (2) has changed nothing, and a lost directory may belong to another run now.
    if error.exit_code == 2 or isinstance(error, RunDirLostError) or not (run_dir / "metrics.jsonl").is_file():
        return
    from mcore_rl.observe.report.run_files import FAILURE

    # The disk may be full, which must not hide the error.
    with suppress(OSError):
        (run_dir / FAILURE).write_text(str(error), encoding="utf-8", errors="replace")
    print(_report(run_dir), file=sys.stderr)
    print(resume_hint(run_dir, advice), file=sys.stderr)


def _report(run_dir: Path, *, keep: bool = False) -> str:
    """Write the report of the run; with `keep`, only if there is none.

    Returns a line with its path, or with the reason why it could not be written.
    """
    from mcore_rl.observe.report.write import REPORT, write_report

    if keep and (run_dir / REPORT).exists():
        return f"report: {run_dir / REPORT}"
    try:
        return f"report: {write_report([run_dir])}"
    # A full disk, for example. The run itself is complete.
    except (McoreRLError, OSError) as error:
        return f"report: not written: {error}"


def is_finished(run_dir: Path, trainer: TrainerConfig) -> bool:
    """Print the progress of the run in run.dir; return True if nothing is left to do."""
    if not (run_dir / "checkpoints").is_dir():  # skip slow imports: a mistyped key is reported at once
        return False
    from mcore_rl.trainer.checkpoints import newest_step

    step, steps = newest_step(run_dir), trainer.steps
    if step is None:
        return False
    if step < steps:
        print(f"resuming from step_{step} in {run_dir}", file=sys.stderr)
        return False
    targets = {f"trainer.{key}": getattr(trainer, key) for key in ("export_hf", "export_adapter")}
    missing = [f"{key}={path}" for key, path in targets.items() if path is not None and not has_export(key, path)]
    if missing:
        print(f"step {steps} of {steps} is done; still to export: {' and '.join(missing)}", file=sys.stderr)
        return False
    print(f"step {steps} of {steps} is done; raise trainer.steps to continue\n")
    return True


def _export_hint(config: Config, run_dir: Path) -> str:
    """Return the path of the exported model, or the command that exports it."""
    from mcore_rl.config.rules.models import uses_lora
    from mcore_rl.config.rules.objective import trains_scores
    from mcore_rl.trainer.checkpoints import newest_step

    if config.trainer.export_hf is not None:
        return config.trainer.export_hf
    # Checkpoints of LoRA runs contain adapters only, and `to-hf` would need the base model too. `to-hf` cannot read the
    # checkpoints of reward models.
    if uses_lora(config.actor) or trains_scores(config):
        return "the same command with trainer.export_hf=DIR"
    newest = run_dir / "checkpoints" / f"step_{newest_step(run_dir)}"
    return f"python -m model_converters to-hf --ckpt {shlex.quote(str(newest))} --out DIR"


@dataclass(frozen=True)
class Start:
    """Start of a run whose configuration has been checked.

    show: prints a line of the start-up log. take_lock: locks run.dir; called after creating it if it did not exist.
    remote_names: names on the hub of local paths in the configuration.
    """

    show: Show
    take_lock: Callable[[], None]
    remote_names: LocalNames = field(default_factory=dict)


def locked(
    config: Config,
    run: Callable[[Start], Result],
    *,
    trains: bool,
    generates: bool = True,
    sends_weights: bool = True,
) -> Result:
    """Download files that the configuration names on the hub, check and isolate the run, then call `run` with run.dir
    locked. `trains`: check also what a training writes, its exports and trackers. `generates`: check also data, engines
    and models that score responses. `sends_weights`: check also that weights can be sent to the engines.
    """
    from mcore_rl.preparation.preflight import check_outputs, check_run, check_update

    show = start_up_log()
    with local_files(config, show, data=generates) as names:
        if generates:
            check_run(config, sends_weights=sends_weights)
        else:
            check_update(config)
        if trains:
            check_outputs(config)
            # After the configuration's own checks: a tracker's check may import its package.
            from mcore_rl.observe.trackers.check import check_observers

            check_observers(config.observe)
        # Imports follow the checks that do not need them, so that errors are reported at once.
        from mcore_rl.runtime.isolation.choice import isolate

        isolate(config, show)
        from mcore_rl.preparation.run_dir import run_lock

        with run_lock(config.run.dir, show, STOPS.give_up) as take_lock:
            return run(Start(show, take_lock, names))


@contextmanager
def local_files(config: Config, show: Show, *, data: bool = True) -> Iterator[LocalNames]:
    """Replace the remote names in the configuration of a run on this machine, as `localized` does. `data`: also names
    of data.

    Raises: ConfigError also for URLs that an isolated run could not reach.
    """
    if data and urls_of(config):
        from mcore_rl.runtime.isolation.choice import reason_for_own_network

        # Before the download, since the restarted process of an isolated run could not repeat it.
        reason_for_own_network(config)
    with localized(config, show, data=data) as names:
        yield names


def _train_locked(config: Config, advice: str, log: ThirdPartyLog, start: Start) -> bool:
    from mcore_rl.assembly import assemble
    from mcore_rl.observe.report.run_files import FAILURE
    from mcore_rl.observe.screen.live import live_screen
    from mcore_rl.preparation.prepare import prepare
    from mcore_rl.preparation.run_dir import make_log_folder, make_run_dir, remove_partial_checkpoints
    from mcore_rl.trainer.checkpoints import check_newest
    from mcore_rl.trainer.copies import fetch_newest
    from mcore_rl.trainer.loop import train as train_policy
    from mcore_rl.trainer.run import Run
    from mcore_rl.trainer.supervised import train_supervised

    show, prepared = start.show, prepare(config)
    recorded = with_remote_names(config, start.remote_names)
    changed = make_run_dir(recorded, prepared.checkpoint_bytes, start.take_lock)
    (Path(config.run.dir) / FAILURE).unlink(missing_ok=True)
    if config.checkpoint.copy_to is not None:
        fetch_newest(config.checkpoint.copy_to, Path(config.run.dir) / "checkpoints", show)
    # Before processes start: a damaged checkpoint could not be loaded.
    check_newest(Path(config.run.dir))
    logs = make_log_folder(Path(config.run.dir))
    log.begin(logs)
    show(f"run directory: {config.run.dir}, output of its processes: {logs.relative_to(config.run.dir)}")
    show(advice)
    for line in (*(f"changed since the last start: {keys}" for keys in changed), *prepared.lines):
        show(str(line))
    try:
        # The screen encloses the run: it shows the end of the processes, and the lines of errors follow below it.
        with live_screen(config, STOPS.restoring) as board, assemble(config, prepared, logs, show, board) as run:
            show("sending the initial weights to the engines" if isinstance(run, Run) else "training")
            finished = train_policy(run) if isinstance(run, Run) else train_supervised(run)
            if finished:
                with nullcontext() if board is None else board.stage("export"):
                    _export(run.actor, config)
    finally:
        # All ranks have ended, so no save is in progress; on a full disk this frees space.
        remove_partial_checkpoints(Path(config.run.dir))
    return finished


def _export(actor: Actor, config: Config) -> None:
    """Write, or upload, the exports of a finished run. Raises: StorageError if an upload fails."""
    trainer = config.trainer
    exports = {"export_hf": actor.export_hf, "export_adapter": actor.export_adapter}
    for name, export in exports.items():
        target: str | None = getattr(trainer, name)
        if target is not None and is_url(target):
            # Every rank writes its slices, so the files must be in a directory that all hosts share.
            with uploaded(f"trainer.{name}", target, Path(config.run.dir) / "uploads" / name) as directory:
                export(directory, config.model.hf_path)
        elif target is not None:
            export(target, config.model.hf_path)


def evaluate(config: Config) -> int:
    """Print the validation accuracy of the newest checkpoint in run.dir, or of model.hf_path if there is none."""
    if not config.data.validation:
        raise ConfigError("data.val must be set: it names the prompts to evaluate on")
    # An evaluation records no metrics, so it needs neither their packages nor a network for them.
    config.observe.trackers, config.observe.prometheus_port = [], 0
    with own_stderr(), STOPS.listening(), third_party_log() as log:
        return locked(config, partial(_evaluate_locked, config, log), trains=False)


def _evaluate_locked(config: Config, log: ThirdPartyLog, start: Start) -> int:
    from mcore_rl.assembly import assemble
    from mcore_rl.config.rules.objective import chosen_objective
    from mcore_rl.preparation.prepare import prepare
    from mcore_rl.preparation.run_dir import make_log_folder, open_run_dir
    from mcore_rl.trainer.checkpoints import check_newest
    from mcore_rl.trainer.loop import evaluate as evaluate_policy
    from mcore_rl.trainer.run import Run
    from mcore_rl.trainer.validation import part_accuracies

    prepared = prepare(config)
    if not prepared.data.prompts:
        raise ConfigError(
            f"{chosen_objective(config)} generates no responses; set trainer.objective=rl and "
            "algorithm.policy_loss.name to another loss than sft"
        )
    directory = open_run_dir(config.run)
    start.take_lock()
    check_newest(Path(config.run.dir))
    # The directory may be new: eval does not need a run.
    (directory / "rollouts").mkdir(exist_ok=True)
    logs = make_log_folder(directory)
    log.begin(logs)
    with assemble(config, prepared, logs, start.show) as run:
        assert isinstance(run, Run)
        result = evaluate_policy(run)
    accuracy, samples = result.accuracies.mean(), config.rollout.validation_samples
    prompts = f"{len(result.accuracies) // samples} prompts" + (f" x {samples} responses" if samples > 1 else "")
    print(f"step {run.state.step}: accuracy {accuracy:.4f} over {prompts}")
    for name, of_part in part_accuracies(result, run.validation_parts).items():
        print(f"  {name}: accuracy {of_part:.4f} over {len(run.validation_parts.rows[name])} prompts")
    return 0


def plan(config: Config, *, as_json: bool, suggest: bool) -> int:
    """Print the resources that the configuration needs or, with `suggest`, layouts that fit.

    Returns the exit code: 0 if the configuration or a suggested layout fits, 1 if not, CANNOT_RUN if the configuration
    fits but this version cannot run it.
    """
    import json
    from dataclasses import asdict

    from rich.console import Console

    from mcore_rl.planner.import_warnings import suppress_megatron_warnings

    suppress_megatron_warnings()
    from mcore_rl.planner.plan import make_plan
    from mcore_rl.planner.report import print_plan, print_suggestions
    from mcore_rl.planner.suggest import suggest_layouts

    console = Console()
    if suggest:
        suggested = suggest_layouts(config)
        if as_json:
            print(json.dumps(asdict(suggested)))
        else:
            print_suggestions(suggested, console)
        return 0 if suggested.suggestions else 1
    made = make_plan(config)
    if as_json:
        print(json.dumps(made.to_json()))
    else:
        print_plan(made, console)
    if not made.fits:
        return 1
    return CANNOT_RUN if made.cannot_run else 0


def slurm(
    config: Config, files: Sequence[str], overrides: Sequence[str], pinned: Sequence[str] = (), *, force: bool
) -> int:
    """Print a job script. With `force` it is printed even if `plan` rejects the job; the reasons go to stderr.
    `pinned`: overrides with the commits of names on the hub.

    Raises: ConfigError.
    """
    from mcore_rl.config.rules.engine_support import cannot_run
    from mcore_rl.preparation.preflight import missing_files
    from mcore_rl.slurm.script import render_job

    script = render_job(config, files, overrides, pinned, force=force)
    cuda = config.cluster.device != "cpu"  # as in a plan
    missing = missing_files(config, cuda=cuda)
    problems = cannot_run(config) + missing
    if not force:
        # The plan takes longest, so it is made only if nothing else is wrong.
        if not problems:
            from mcore_rl.planner.import_warnings import suppress_megatron_warnings

            suppress_megatron_warnings()
            from mcore_rl.planner.plan import make_plan

            problems = list(make_plan(config).verdict.errors)
        if problems:
            raise ConfigError(f"the job cannot run: {'; '.join(problems)}. --force prints the script anyway")
    print(script, end="")
    for problem in problems:
        print(f"note: {problem}", file=sys.stderr)
    return 0
