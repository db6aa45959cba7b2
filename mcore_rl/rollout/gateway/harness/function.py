"""User's function as the program of a session."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any

from mcore_rl.config.functions import check_call, load_function
from mcore_rl.data.json_text import to_plain
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.gateway.exchange import MAX_REWARD, OpenedSession
from mcore_rl.rollout.gateway.harness.interface import Finished

KEY = "rollout.harness"
FORM = "f(row, base_url, api_key)"
TRACE_CHARACTERS = 2000


class FunctionHarness:
    """Calls `f(row, base_url, api_key)`, which returns None (graders compute the reward), a number, or a dict.

    A dict may have `score`, `rewards` (of single replies, by their ids) and further values for graders, of which the
    numbers in `metrics` are metrics of the run. Plain functions run in threads, which a cancelled call leaves running.

    base_url: of the session; OpenAI's clients need base_url + "/v1", Anthropic's base_url.

    Raises: ConfigError if the function cannot be loaded or called.
    """

    def __init__(self, spec: str, kwargs: Mapping[str, str]) -> None:
        self._function: Callable[..., Any] = load_function(KEY, spec, "a command", may_be_async=True)
        check_call(f"{KEY}={spec}", self._function, ("row", "base_url", "api_key"), kwargs, FORM)
        self._kwargs = dict(kwargs)

    async def run(self, session: OpenedSession, base_url: str) -> Finished:
        """Same as Harness.run. An error of the function is an error of the session."""
        arguments = {"row": dict(session.row), "base_url": base_url, "api_key": session.key, **self._kwargs}
        try:
            if inspect.iscoroutinefunction(self._function):
                return _finished(await self._function(**arguments))
            return _finished(await _in_thread(partial(self._function, **arguments)))
        # A program may call sys.exit, or cancel its own tasks.
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the worker cuts the program
            shown = "".join(traceback.format_exception(error))[-TRACE_CHARACTERS:]
            return Finished(error=f"{KEY} raised {type(error).__name__}: {error}\n{shown}")


async def _in_thread(call: Callable[[], object]) -> object:
    """Call a function in a thread of its own: one that never returns must not take the place of others."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[object] = loop.create_future()

    def settle(result: object, error: BaseException | None) -> None:
        if ended.done():  # the program was cut
            return
        if error is None:
            ended.set_result(result)
        else:
            ended.set_exception(error if isinstance(error, Exception) else RuntimeError(f"it raised {error!r}"))

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="harness", daemon=True).start()
    return await ended


def _finished(returned: object) -> Finished:
    if returned is None:
        return Finished()
    if isinstance(returned, Mapping):
        score, rewards = returned.get("score"), returned.get("rewards") or {}
        plain = to_plain({str(name): value for name, value in returned.items() if name not in ("score", "rewards")})
        assert isinstance(plain, dict)
        if not isinstance(rewards, Mapping):
            raise ConfigError(
                f"it returned rewards as {type(rewards).__name__} instead of a dict by the ids of replies"
            )
        of_replies = {str(reply): _number(value) for reply, value in rewards.items()}
        return Finished(None if score is None else _number(score), of_replies, plain)
    return Finished(_number(returned))


def _number(value: object) -> float:
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, Real):
        raise ConfigError(f"it returned {type(value).__name__} instead of None, a number or a dict with score")
    if not abs(float(number)) <= MAX_REWARD:  # also False for a number that is not finite
        raise ConfigError(f"it returned {float(number)}, which is no finite number, or too large")
    return float(number)
