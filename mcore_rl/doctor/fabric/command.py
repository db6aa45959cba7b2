"""`mcore-rl doctor --node`: takes part in a test, and prints its report on node 0."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys

from mcore_rl.doctor.fabric.place import place_of
from mcore_rl.doctor.fabric.report import as_json, as_text
from mcore_rl.doctor.fabric.supervisor import Limits, supervise
from mcore_rl.errors import ConfigError


def measure_fabric(options: argparse.Namespace) -> int:
    """Returns 0 when all is well, 1 when anything on any node is slow or failing.

    Raises: ConfigError, McoreRLError when node 0 does not answer.
    """
    limits = _limits(options)
    if options.slots is not None and options.slots < 1:
        raise ConfigError(f"--slots={options.slots} must be at least 1")
    place = place_of(options, os.environ)
    report = supervise(place, options.slots, limits)
    if place.index == 0:
        print(as_json(report) if options.json else as_text(report))
    leave_the_unkillable(exit_code := 1 if report.problems else 0)
    return exit_code


def _limits(options: argparse.Namespace) -> Limits:
    usual = Limits()
    timeout = usual.timeout_seconds if options.timeout is None else options.timeout
    percent = usual.slow_percent if options.slow_percent is None else options.slow_percent
    if timeout < 1:
        raise ConfigError(f"--timeout={timeout} must be at least 1 second")
    if not 0 <= percent <= 100:
        raise ConfigError(f"--slow-percent={percent} must be one of 0 to 100")
    return Limits(timeout, percent)


def leave_the_unkillable(exit_code: int) -> None:
    """Ends this process at once if a rank hangs in a driver where no signal reaches it: Python would wait for it."""
    if multiprocessing.active_children():
        sys.stdout.flush()
        os._exit(exit_code)
