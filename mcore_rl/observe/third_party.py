"""Redirects log records and warnings of third-party packages to logs/driver.log of the run directory."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWN_LOGGERS = ("mcore_rl", "model_converters")


class ThirdPartyLog:
    """Buffers lines until the run directory exists, then appends them to logs/driver.log."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._lines: list[str] = []

    def write(self, line: str) -> None:
        """Write or buffer a line. Buffered lines are lost if invalid input ends the run before its directory exists."""
        self._lines.append(line.rstrip("\n") + "\n")
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(self._lines)
            self._lines = []

    def begin(self, directory: Path) -> None:
        """Write buffered and later lines to driver.log in `directory`."""
        directory.mkdir(exist_ok=True)
        self._path = directory / "driver.log"
        for line in [self._lines.pop(0) for _ in range(len(self._lines))]:
            self.write(line)


class _Handler(logging.Handler):
    def __init__(self, log: ThirdPartyLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] not in OWN_LOGGERS:
            self._log.write(f"{record.levelname} {record.name}: {record.getMessage()}")


@contextmanager
def third_party_log() -> Iterator[ThirdPartyLog]:
    """Send warnings and log records of other packages to the log. Those of this project still go to stderr."""
    log = ThirdPartyLog()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: object = None,
        line: object = None,
    ) -> None:
        del file, line
        log.write(f"{filename}:{lineno}: {category.__name__}: {message}")

    handler, stream_handler = _Handler(log), logging.StreamHandler()
    root, loggers = logging.getLogger(), [logging.getLogger(name) for name in OWN_LOGGERS]
    with warnings.catch_warnings():
        # catch_warnings restores it.
        warnings.showwarning = show
        root.addHandler(handler)
        # logging prints warnings to stderr only while no handler exists (lastResort), so these loggers need one now.
        for logger in loggers:
            logger.addHandler(stream_handler)
        try:
            yield log
        finally:
            root.removeHandler(handler)
            for logger in loggers:
                logger.removeHandler(stream_handler)
