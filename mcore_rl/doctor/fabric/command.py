"""`mcore-rl doctor --node`: runs the fabric test on this node; node 0 prints the report."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys

from mcore_rl.doctor.fabric.place import place_of
from mcore_rl.doctor.fabric.supervisor import Limits, supervise
from mcore_rl.errors import ConfigError


def measure_fabric(options: argparse.Namespace) -> int:
    """Run the test. Returns 0 if all is well, 1 if anything on any node is slow or failing.

    Raises: ConfigError, McoreRLError if node 0 is not reachable.
    """
    limits = _limits(options)
    if options.slots is not None and options.slots < 1:
        raise ConfigError(f"--slots={options.slots} must be at least 1")
    place = place_of(options, os.environ)
    report = supervise(place, options.slots, limits)
    if place.index == 0:
        print(report.as_json() if options.json else report.as_text())
    exit_code = 1 if report.problems else 0
    exit_if_unkillable(exit_code)
    return exit_code


def _limits(options: argparse.Namespace) -> Limits:
    timeout = Limits.timeout_seconds if options.timeout is None else options.timeout
    percent = Limits.slow_percent if options.slow_percent is None else options.slow_percent
    if timeout < 1:
        raise ConfigError(f"--timeout={timeout} must be at least 1 second")
    if not 0 <= percent <= 100:
        raise ConfigError(f"--slow-percent={percent} must be one of 0 to 100")
    return Limits(timeout, percent)


def exit_if_unkillable(exit_code: int) -> None:
    """Exit at once if a rank hangs in a driver, where no signal reaches it: Python would wait for it at exit."""
    if multiprocessing.active_children():
        sys.stdout.flush()
        os._exit(exit_code)
