"""`mcore-rl train --dry-run`: all steps of a start that write nothing, and the processes that would follow."""

from __future__ import annotations

import socket
from pathlib import Path

from rich.console import Console

from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.observe.progress import start_up_log
from mcore_rl.observe.terminal_text import visible
from mcore_rl.observe.third_party import third_party_log
from mcore_rl.remote.localize import Show
from mcore_rl.verbs import is_finished, local_files


def dry_run(config: Config) -> int:
    """Resolve, check and plan the run, and print its plan and processes. Starts no process of the run and leaves
    run.dir and data.cache_dir as they are.

    Returns the exit code: 0 if the run would start and fits, or is finished; 1 if it does not fit.
    Raises: ConfigError, DataError, as `train`.
    """
    show, console = start_up_log(), Console(highlight=False)
    # Warnings of other packages, which a run writes to driver.log, are dropped.
    with third_party_log():
        if is_finished(Path(config.run.dir), config.trainer):
            return 0
        # A temporary directory for files of URLs, since a run would write them there, with the tokenized rows.
        config.data.cache_dir = None
        with local_files(config, show):
            _check(config, show)
            fits = _print_processes(config, show, console)
    console.print(visible(f"dry run: nothing was started, and nothing was written to {config.run.dir}"), soft_wrap=True)
    return 0 if fits else 1


def _check(config: Config, show: Show) -> None:
    """Make the checks of `train` that come before the data is read."""
    from mcore_rl.observe.trackers.check import check_observers
    from mcore_rl.preparation.preflight import check_outputs, check_run
    from mcore_rl.runtime.addresses import missing_interface
    from mcore_rl.runtime.isolation.choice import reason_for_own_network

    check_run(config)
    check_outputs(config)
    check_observers(config.observe)
    if problem := missing_interface():
        raise ConfigError(problem)
    if reason := reason_for_own_network(config):
        show(f"{reason}: the run gets a network of its own, and its processes cannot reach other machines")
    from mcore_rl.preparation.run_dir import holder_renewal

    if holder := holder_renewal(Path(config.run.dir)):
        show(f"run.dir={config.run.dir} was taken by {holder[0]}; a run starts there only after that process has ended")


def _print_processes(config: Config, show: Show, console: Console) -> bool:
    """Prepare and plan the run; print its data, plan and processes. Returns whether the plan fits."""
    from mcore_rl.debugging.process_table import node_line, process_table
    from mcore_rl.planner.plan import make_plan
    from mcore_rl.planner.report import print_plan
    from mcore_rl.preparation.prepare import prepare
    from mcore_rl.preparation.run_dir import check_can_create
    from mcore_rl.resolved.process_plan import plan_processes
    from mcore_rl.role_groups import roles_of
    from mcore_rl.runtime.launch import guests_of
    from mcore_rl.trainer.checkpoints import check_newest

    prepared, run_dir = prepare(config), Path(config.run.dir)
    check_can_create(run_dir, prepared.checkpoint_bytes)
    check_newest(run_dir)
    for line in prepared.lines:
        show(str(line))
    guests = guests_of(roles_of(config, prepared))
    processes = plan_processes(config, guests, with_engines=bool(prepared.data.prompts))
    plan = make_plan(config)
    print_plan(plan, console)
    console.print(process_table(processes, config))
    console.print(visible(node_line(config, socket.gethostname())), soft_wrap=True)
    return plan.fits
