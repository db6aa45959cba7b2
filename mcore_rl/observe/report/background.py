"""Writing of the report while a run continues."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rl.parent_death import guarded

logger = logging.getLogger(__name__)

LOG = "report.log"
STOP_SECONDS = 10
"""Time that a stopped process has to remove its temporary file."""


@dataclass
class ReportProcess:
    """Writes the report every `every_steps` steps (0: never) in a process with the lowest priority.

    The process costs the driver one fork per report. A report that is due while the last one is still being written is
    skipped. Errors of the process go to report.log in `logs`. They do not concern the run, and neither does a process
    that cannot be started, which is logged.
    """

    run_dir: Path
    logs: Path
    every_steps: int
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def step_finished(self, step: int) -> None:
        """Start a report if one is due after `step`."""
        due = self.every_steps > 0 and step > 0 and step % self.every_steps == 0
        if not due or (self._process is not None and self._process.poll() is None):
            return
        try:
            self._process = self._start()
        except OSError as error:
            logger.warning("the report of step %d cannot be written: %s", step, error)

    def _start(self) -> subprocess.Popen[bytes]:
        # guarded: a driver that is killed does not leave the process behind.
        command = guarded(sys.executable, "-m", "mcore_rl.cli", "report", str(self.run_dir))
        self.logs.mkdir(exist_ok=True)
        with (self.logs / LOG).open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        # It may have ended already.
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        return process

    def close(self) -> None:
        """Stop a report that is being written; the end of the run writes another one."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
