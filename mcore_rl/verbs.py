"""What the verbs of the command line do: prepare, assemble, run, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.config.schema import Config
from mcore_rl.observe.metrics import read_metrics
from mcore_rl.observe.summary import summary_table

CANNOT_RUN = 3
"""Exit code of a plan that fits and that this version cannot run."""


def train(config: Config) -> int:
    """Starts the run, or continues what run.dir holds; prints what training changed. Returns the exit code, which is
    os.EX_TEMPFAIL (75) when SIGUSR1 asked it to stop before it was finished."""
    from mcore_rl.assembly import assemble
    from mcore_rl.preparation import make_run_dir, prepare
    from mcore_rl.trainer.loop import train as train_policy
    from mcore_rl.trainer.run import Run
    from mcore_rl.trainer.supervised import train_supervised

    prepared = prepare(config)
    make_run_dir(config, prepared.checkpoint_bytes)
    for report in prepared.reports:
        print(report, file=sys.stderr)
    with assemble(config, prepared) as run:
        finished = train_policy(run) if isinstance(run, Run) else train_supervised(run)
        if finished and config.trainer.export_hf is not None:
            run.actor.export_hf(config.trainer.export_hf, config.model.hf_path)
        if finished and config.trainer.export_adapter is not None:
            run.actor.export_adapter(config.trainer.export_adapter, config.model.hf_path)
    if not finished:
        print(f"stopped as asked after step {run.state.step}, which is saved; the same command goes on from there")
        return os.EX_TEMPFAIL
    print(summary_table(read_metrics(Path(config.run.dir) / "metrics.jsonl")))
    print(f"run directory: {config.run.dir}")
    return 0


def evaluate(config: Config) -> int:
    """Validation accuracy of the newest checkpoint in run.dir, or of model.hf_path when there is none."""
    from mcore_rl.assembly import assemble
    from mcore_rl.errors import ConfigError
    from mcore_rl.preparation import prepare
    from mcore_rl.trainer.evaluation import evaluate as evaluate_policy
    from mcore_rl.trainer.run import Run

    if config.data.val is None:
        raise ConfigError("data.val must be set: it names the prompts to evaluate on")
    prepared = prepare(config)
    if prepared.targets is not None:
        raise ConfigError("algorithm.policy_loss.name: eval generates responses; name a policy loss, not sft")
    Path(config.run.dir, "rollouts").mkdir(parents=True, exist_ok=True)
    with assemble(config, prepared) as run:
        assert isinstance(run, Run)
        result = evaluate_policy(run)
    accuracy, samples = result.accuracies.mean(), config.rollout.validation_samples
    prompts = f"{len(result.accuracies) // samples} prompts" + (f" x {samples} responses" if samples > 1 else "")
    print(f"step {run.state.step}: accuracy {accuracy:.4f} over {prompts}")
    return 0


def plan(config: Config, *, as_json: bool, suggest: bool) -> int:
    """Prints what the configuration needs, or layouts that fit; the exit code says whether it fits and can be run."""
    import json

    from rich.console import Console

    _quiet_megatron()
    from mcore_rl.planner.plan import make_plan
    from mcore_rl.planner.report import print_plan, print_suggestions
    from mcore_rl.planner.suggest import suggest_layouts

    console = Console()
    if suggest:
        found = suggest_layouts(config)
        if as_json:
            print(json.dumps(found.to_json()))
        else:
            print_suggestions(found, console)
        return 0 if found.suggestions else 1
    made = make_plan(config)
    if as_json:
        print(json.dumps(made.to_json()))
    else:
        print_plan(made, console)
    if not made.fits:
        return 1
    return CANNOT_RUN if made.cannot_run else 0


def slurm(config: Config, config_path: str, overrides: Sequence[str], *, force: bool) -> int:
    """Prints a job script, or with `force` also that of a job which is certain to be refused, and why.

    Raises: ConfigError.
    """
    from mcore_rl.config.available import cannot_run
    from mcore_rl.errors import ConfigError
    from mcore_rl.preflight import missing_files
    from mcore_rl.slurm.script import render_job

    script = render_job(config, config_path, overrides, force=force)
    problems = cannot_run(config) + missing_files(config)
    if not force:
        problems = problems or _plan_errors(config)
        if problems:
            raise ConfigError(f"the job would be refused: {'; '.join(problems)}. --force renders it all the same")
    print(script, end="")
    for problem in problems:
        print(f"note: {problem}", file=sys.stderr)
    return 0


def _plan_errors(config: Config) -> list[str]:
    """Why the run does not fit its cluster.

    Raises: ConfigError for what cannot work on any.
    """
    _quiet_megatron()
    from mcore_rl.planner.plan import make_plan

    return list(make_plan(config).verdict.errors)


def _quiet_megatron() -> None:
    """Megatron tells what is not installed as it is imported; here nothing is run (`mcore-rl doctor` tells it)."""
    import warnings

    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
