"""Command `mcore-rl doctor`: options, and selection of the installation report or the fabric test."""

from __future__ import annotations

import argparse
import os
import sys

from mcore_rl.errors import ConfigError

FABRIC_OPTIONS = ("slots", "rendezvous", "nodes", "node_rank", "port", "timeout", "slow_percent", "json")
"""Options that require --node."""
TIMEOUT_SECONDS, SLOW_PERCENT = 120, 80
RANGES = (
    ("slots", range(1, sys.maxsize), "at least 1"),
    ("timeout", range(1, sys.maxsize), "at least 1 second"),
    ("slow_percent", range(101), "one of 0 to 100"),
    ("port", range(1, 65536), "one of 1 to 65535"),
)
"""Options of the fabric test: name, valid values, and a description of the values for errors."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Options of the fabric test default to None."""
    parser.add_argument("--missing", action="store_true", help="print only missing packages that every run needs")
    group = parser.add_argument_group(
        "fabric test",
        "Measures matrix products, copies and all-reduces on every GPU (on CPU: in every slot) of this node, or of all "
        "nodes of a job step in which srun starts one task per node. Exit code 0: all is well, 1: slow or failing.",
    )
    group.add_argument("--node", action="store_true", help="run the fabric test instead of checking the installation")
    group.add_argument("--slots", type=int, metavar="N", help="ranks per node; default: its GPUs, on CPU 1")
    group.add_argument("--rendezvous", metavar="HOST:PORT", help="address of node 0; outside SLURM only")
    group.add_argument("--nodes", type=int, metavar="N", help="number of nodes at the rendezvous")
    group.add_argument("--node-rank", type=int, metavar="I", help="index of this node, from 0")
    group.add_argument(
        "--port", type=int, metavar="P", help="port on the first node of a SLURM job step; default 29400"
    )
    group.add_argument("--timeout", type=int, metavar="SECONDS", help=f"timeout of a stage; default {TIMEOUT_SECONDS}")
    group.add_argument(
        "--slow-percent",
        type=int,
        metavar="P",
        help=f"a value below this percentage of the others' median is slow; default {SLOW_PERCENT}",
    )
    group.add_argument(
        "--json", action="store_true", default=None, help="print the report as one JSON object on stdout"
    )


def run(options: argparse.Namespace) -> int:
    """Print the report. Returns 0 if the CPU or GPU path is complete or the fabric test passes, otherwise 1.

    Raises: ConfigError for options that exclude each other, McoreRLError if the rendezvous of the nodes fails.
    """
    if not options.node:
        given = [name for name in FABRIC_OPTIONS if getattr(options, name) is not None]
        if given:
            raise ConfigError(f"{_flag(given[0])} belongs to the fabric test: add --node")
        from mcore_rl.doctor.report import check_installation

        return check_installation(only_missing=options.missing)
    if options.missing:
        raise ConfigError("--missing cannot be combined with --node: remove one of them")
    from mcore_rl.resolved.installed import has_module

    if not has_module("torch"):  # the fabric test's modules import it
        raise ConfigError("--node needs torch: make setup")
    return _test_fabric(options)


def _test_fabric(options: argparse.Namespace) -> int:
    """Run the fabric test; node 0 prints the report. Returns 1 if anything on any node is slow or failing."""
    from mcore_rl.doctor.fabric.rendezvous import place_of
    from mcore_rl.doctor.fabric.supervisor import exit_if_unkillable, supervise

    for name, allowed, description in RANGES:
        value = getattr(options, name)
        if value is not None and value not in allowed:
            raise ConfigError(f"{_flag(name)}={value} must be {description}")
    place = place_of(options, os.environ)
    timeout = TIMEOUT_SECONDS if options.timeout is None else options.timeout
    percent = SLOW_PERCENT if options.slow_percent is None else options.slow_percent
    report = supervise(place, options.slots, timeout, percent)
    if place.index == 0:  # the report is the same on every node
        print(report.as_json() if options.json else report.as_text())
    exit_code = 1 if report.problems else 0
    exit_if_unkillable(exit_code)
    return exit_code


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
