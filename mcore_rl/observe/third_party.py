"""Redirects log records and warnings of third-party packages to driver.log in the log folder of this start."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWN_LOGGERS = ("mcore_rl", "model_converters")


class ThirdPartyLog(logging.Handler):
    """Buffers lines until the run directory exists, then appends them to driver.log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._path: Path | None = None
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # Records of this project go to its own handler, which writes to stderr.
        if record.name.partition(".")[0] not in OWN_LOGGERS:
            self.write(f"{record.levelname} {record.name}: {record.getMessage()}")

    def write(self, line: str) -> None:
        """Write or buffer a line. Buffered lines are lost if invalid input ends the run before its directory exists."""
        self._lines.append(line.rstrip("\n") + "\n")
        if self._path is not None:
            self._flush_to(self._path)

    def begin(self, directory: Path) -> None:
        """Write buffered and later lines to driver.log in `directory`."""
        directory.mkdir(exist_ok=True)
        self._path = directory / "driver.log"
        if self._lines:
            self._flush_to(self._path)

    def _flush_to(self, path: Path) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(self._lines)
        self._lines = []


@contextmanager
def third_party_log() -> Iterator[ThirdPartyLog]:
    """Send warnings and log records of other packages to the log. Those of this project still go to stderr."""
    log = ThirdPartyLog()

    stream_handler, root = logging.StreamHandler(), logging.getLogger()
    loggers = [logging.getLogger(name) for name in OWN_LOGGERS]
    with warnings.catch_warnings():
        # catch_warnings restores it.
        warnings.showwarning = lambda message, category, filename, lineno, file=None, line=None: log.write(
            f"{filename}:{lineno}: {category.__name__}: {message}"
        )
        root.addHandler(log)
        # logging prints warnings to stderr only while no handler exists (lastResort), so these loggers need one now.
        for logger in loggers:
            logger.addHandler(stream_handler)
        try:
            yield log
        finally:
            root.removeHandler(log)
            for logger in loggers:
                logger.removeHandler(stream_handler)
