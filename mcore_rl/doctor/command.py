"""The verb `doctor`: its options, and which of its two reports they ask for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mcore_rl.errors import ConfigError, McoreRLError

OF_THE_FABRIC_TEST = ("slots", "rendezvous", "nodes", "node_rank", "port", "timeout", "slow_percent", "json")
"""Options that say nothing without --node."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb. Those of the fabric test are None where they are not given."""
    parser.add_argument("--missing", action="store_true", help="print only what every run needs and is not there")
    group = parser.add_argument_group(
        "fabric test",
        "Products, copies and all-reduces on every GPU (on CPU: in every slot) of the node, or of all nodes of a job "
        "step in which srun runs this once per node. Exit code 0 all is well, 1 something is slow or failing.",
    )
    group.add_argument("--node", action="store_true", help="measure instead of listing what is installed")
    group.add_argument("--slots", type=int, metavar="N", help="ranks per node; default: its GPUs, on CPU 1")
    group.add_argument("--rendezvous", metavar="HOST:PORT", help="where node 0 is reached; only outside SLURM")
    group.add_argument("--nodes", type=int, metavar="N", help="how many take part in the rendezvous")
    group.add_argument("--node-rank", type=int, metavar="I", help="which of them this is, from 0")
    group.add_argument("--port", type=int, metavar="P", help="of the first node of a SLURM job step; default 29400")
    group.add_argument("--timeout", type=int, metavar="SECONDS", help="in which a stage has to be over; default 120")
    group.add_argument(
        "--slow-percent", type=int, metavar="P", help="of the others' median; what reaches less is slow; default 80"
    )
    group.add_argument("--json", action="store_true", default=None, help="the report as one JSON object on stdout")


def main(arguments: Sequence[str] = ()) -> int:
    """Runs the verb as a program of its own; returns the exit code."""
    parser = argparse.ArgumentParser(prog="mcore-rl doctor", description="What is installed, what is missing for what.")
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except McoreRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(options: argparse.Namespace) -> int:
    """Prints what is asked for. Returns 0 when the CPU or the GPU path is complete, or the fabric is well; else 1.

    Raises: ConfigError for options that do not go together, McoreRLError when the nodes do not find each other.
    """
    if not options.node:
        given = [name for name in OF_THE_FABRIC_TEST if getattr(options, name) is not None]
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')} belongs to the fabric test: add --node")
        return _list_what_is_here(only_missing=options.missing)
    if options.missing:
        raise ConfigError("--missing does not go with --node: leave one of them out")
    from mcore_rl.resolved.installed import has_module

    if not has_module("torch"):
        raise ConfigError("--node needs torch: make setup")
    from mcore_rl.doctor.fabric.command import measure_fabric

    return measure_fabric(options)


def _list_what_is_here(*, only_missing: bool) -> int:
    from mcore_rl.doctor import checks, report
    from mcore_rl.resolved.installed import here

    results = checks.report()
    complete = [path for path in (checks.Need.CPU, checks.Need.GPU) if report.is_complete(results, path)]
    if only_missing:
        needed = (checks.Need.BOTH, checks.Need.CPU)
        report.print_plain([] if complete else [c for c in results if not c.ok and c.need in needed])
    elif sys.stdout.isatty():
        report.print_table(results)
    else:
        report.print_plain(results)
    if not only_missing:
        try:
            installed = here()
            report.print_implementation(installed)
            if installed.cuda and not report.print_trials():
                complete = []
        except ConfigError as error:
            print(f"no model can be built from what is here: {error}")
            complete = []
        print()
    print("\n".join(report.verdicts(results)))
    return 0 if complete else 1
