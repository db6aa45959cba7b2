"""Environments of Verifiers: SingleTurnEnv, MultiTurnEnv, ToolEnv and others, with their rubric as the reward."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mcore_rl.config.functions import absolute_spec, describe, load_object
from mcore_rl.data.json_text import to_plain
from mcore_rl.errors import ConfigError
from mcore_rl.rollout.connectors.client import MODEL, Endpoint, client
from mcore_rl.rollout.connectors.interface import EVAL, RowRequest, row_of
from mcore_rl.rollout.connectors.libraries import import_library
from mcore_rl.types.json import JsonObject, JsonValue

if TYPE_CHECKING:
    import verifiers

KIND = "verifiers"
FACTORY = "load_environment"
"""Function of an environment's module that constructs it."""
import_library(KIND)

_OF_THE_POLICY = (
    *("InvalidModelResponseError", "EmptyModelResponseError"),
    *("ToolError", "ToolParseError", "ToolCallError"),
)
"""Errors of the library that a reply causes, such as an empty one. They end an episode with the rubric's reward."""


class VerifiersSuite:
    """Plays rows of environments. An environment is constructed once per process and arguments."""

    def __init__(self) -> None:
        self._environments: dict[str, verifiers.Environment] = {}

    def rows(self, request: RowRequest) -> Iterator[JsonObject]:
        """Same as Rows.rows. `name`: id of an installed environment, or a file with `load_environment`."""
        environment = self.load(request.name, request.arguments)
        limit = -1 if request.limit is None else request.limit
        is_eval = request.split == EVAL
        try:
            examples = environment.get_eval_dataset(n=limit) if is_eval else environment.get_dataset(n=limit)
        except Exception as error:  # the split has no data set, or the environment's code cannot make it
            raise ConfigError(
                f"environment {request.name} has no data set for --split {request.split}: {describe(error)}; set "
                "--split to the other one, or check --arguments"
            ) from error
        name = absolute_spec(f"{request.name}:{FACTORY}").rpartition(":")[0]
        shown = Path(request.name).stem
        for example in examples:
            given = cast(JsonObject, to_plain(example))
            part: JsonObject = {"name": name, "arguments": dict(request.arguments), "input": given}
            messages = given.get("prompt")
            if not isinstance(messages, list):  # environments of the completions interface
                raise ConfigError(f"{request.name}: the prompts are no chat messages; use message_type='chat'")
            yield row_of(KIND, shown, messages, part, str(given.get("answer") or ""))

    async def run(self, part: JsonObject, endpoint: Endpoint) -> dict[str, object]:
        """Same as Suite.run.

        Raises: RuntimeError if a request failed. The episode fails, or ends at the limit that refused the request.
        """
        environment = self.load(str(part["name"]), cast("Mapping[str, JsonValue]", part["arguments"]))
        output = await environment.run_rollout(
            cast("verifiers.RolloutInput", part["input"]),
            client(endpoint),
            MODEL,
            sampling_args={},
        )
        error = output["error"]
        if error is not None and error["error"] not in _OF_THE_POLICY:
            raise RuntimeError(f"the environment stopped: {error['error_chain_repr']}")
        facts = {name: output[name] for name in ("stop_condition", "is_truncated")}
        return {"score": output["reward"], "metrics": output["metrics"], **facts}

    def load(self, name: str, arguments: Mapping[str, JsonValue]) -> verifiers.Environment:
        """Return an environment.

        Raises: ConfigError if it cannot be constructed, or compares the rollouts of a group.
        """
        key = repr((name, sorted(arguments.items())))
        if key not in self._environments:
            self._environments[key] = _made(name, arguments)
        return self._environments[key]


def _made(name: str, arguments: Mapping[str, JsonValue]) -> verifiers.Environment:
    import verifiers

    origin = f"environment {name}"
    with _kept_signals():
        try:
            if name.endswith(".py"):
                made = cast("type[verifiers.Environment]", load_object("environment", f"{name}:{FACTORY}"))(**arguments)
            else:
                made = verifiers.load_environment(name, **arguments)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{origin} cannot be constructed: {describe(error)}; install its package, or name a file.py with "
                f"{FACTORY}, and check --arguments"
            ) from error
    if not isinstance(made, verifiers.Environment):
        raise ConfigError(f"{origin}: {FACTORY} returned {type(made).__name__} instead of a verifiers.Environment")
    if _compares_groups(made.rubric):
        raise ConfigError(
            f"{origin} has reward functions of a whole group; each row is played alone, so use functions of one rollout"
        )
    return made


def _compares_groups(rubric: verifiers.Rubric) -> bool:
    """Return whether a rubric, or one that it contains, has a function of all rollouts of a group."""
    parts = getattr(rubric, "rubrics", ())
    return bool(rubric._get_group_reward_funcs()) or any(map(_compares_groups, parts))


@contextlib.contextmanager
def _kept_signals() -> Iterator[None]:
    """Keep the process's signal handlers, which the constructor of an environment replaces."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
