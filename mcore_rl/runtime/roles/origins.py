"""Origins of errors: role, rank and host of the process that raised an error.

An exception keeps its attributes when it is pickled. The process that raises it sets one, and the driver adds it to the
message.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ray.exceptions import RayTaskError

from mcore_rl.errors import McoreRLError
from mcore_rl.weights.transports.hosts import this_host

_ORIGIN = "mcore_rl_origin"

Process = TypeVar("Process", bound=type)


def marks_errors(process: Process) -> Process:
    """Decorate a process class, below `ray.remote`: errors of public methods carry the `name` of the process and its
    host. An error that comes from another process keeps its own origin."""
    for name, method in inspect.getmembers(process, inspect.isfunction):
        if not name.startswith("_"):
            setattr(process, name, _marking(method))
    return process


def _marking(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            return method(self, *arguments, **keywords)
        except Exception as error:
            # An error of a process that was called from here already names that process.
            if origin_of(error) is None:
                setattr(error, _ORIGIN, f"{self.name} on {this_host().name}")
            raise

    return call


def origin_of(error: BaseException) -> str | None:
    """Return, for example, `trainer rank 1 on node3`; None for an error without an origin."""
    origin = getattr(error, _ORIGIN, None)
    return origin if isinstance(origin, str) else None


def with_origin(error: BaseException, origin: str | None) -> str:
    """Return the message of an error, with its origin unless the message already contains it."""
    text = str(error)
    return text if origin is None or origin in text else f"{text} ({origin})"


def named(error: McoreRLError, origin: str | None) -> McoreRLError:
    """Add the origin to the message of an error."""
    error.args = (with_origin(error, origin),)
    return error


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def last_lines(error: RayTaskError) -> str:
    """Return the end of the remote traceback: the frame that failed and the message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[-12:])
