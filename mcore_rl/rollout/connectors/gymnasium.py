"""Environments of Gymnasium whose actions are discrete or texts: rollout.environment=...gymnasium:TextEnvironment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat, cast

from mcore_rl.config.functions import describe
from mcore_rl.data.json_text import to_plain
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.rollout.connectors.interface import EVAL, RowRequest, part_of, row_of
from mcore_rl.rollout.connectors.libraries import import_library
from mcore_rl.rollout.episodes.session import EpisodePrompt
from mcore_rl.types.json import JsonObject, JsonValue

if TYPE_CHECKING:
    import gymnasium

KIND = "gymnasium"
NUM_SEEDS = 1000
"""Number of rows without a limit."""
FIRST_EVAL_SEED = 10**6
import_library(KIND)


class GymnasiumRows:
    """Rows with the first observation of each seed."""

    def rows(self, request: RowRequest) -> Iterator[JsonObject]:
        """Same as Rows.rows. `name`: id of an environment, or module:id."""
        environment = _make(request.name, request.arguments)
        try:
            actions = Actions.of(environment, request.actions)
            instruction = request.prompt if request.prompt is not None else actions.instruction()
            first = FIRST_EVAL_SEED if request.split == EVAL else 0
            for seed in range(first, first + (request.limit or NUM_SEEDS)):
                text = "\n\n".join(filter(None, (instruction, _first(environment, request.name, seed))))
                part: JsonObject = {
                    "name": request.name,
                    "arguments": dict(request.arguments),
                    "actions": list(request.actions),
                    "seed": seed,
                }
                yield row_of(KIND, request.name, [{"role": "user", "content": text}], part)
        finally:
            environment.close()


class TextEnvironment:
    """Environment of the episode `environment`: each turn of the model is an action, each observation a user turn.

    An action that cannot be read does not reach the environment: the model sees the allowed actions, with reward 0.
    `prompt` is a row of `mcore-rl rows gymnasium`.
    """

    def __init__(self, prompt: EpisodePrompt) -> None:
        part = part_of(prompt.extra_info, KIND)
        self._environment = _make(str(part["name"]), cast("Mapping[str, JsonValue]", part["arguments"]))
        self._actions = Actions.of(self._environment, cast("Sequence[str]", part["actions"]))
        self._seed, self._prompt = int(cast(int, part["seed"])), prompt.messages

    def reset(self) -> None:
        """Set the seed's state, whose observation the prompt has.

        Raises: DataError if the environment gives another observation than when the rows were written.
        """
        observation, _ = self._environment.reset(seed=self._seed)
        if not str(self._prompt[-1]["content"]).endswith(_shown(self._environment, observation)):
            raise DataError(
                f"seed {self._seed} gives another first observation than the row's; write the rows again with "
                "`mcore-rl rows gymnasium`, and use an environment that depends on its seed only"
            )

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return observation, reward and whether the environment has ended, also by its own limit."""
        chosen = self._actions.read(action)
        if chosen is None:
            return self._actions.reminder(), 0.0, False
        observation, reward, terminated, truncated, _ = self._environment.step(chosen)
        return _shown(self._environment, observation), float(cast(SupportsFloat, reward)), terminated or truncated

    def close(self) -> None:
        self._environment.close()


@dataclass(frozen=True)
class Actions:
    """Actions of an environment as texts. names: of a discrete space, in the order of its numbers from `start`; None:
    actions are texts of `space`."""

    names: Sequence[str] | None
    start: int
    space: gymnasium.Space[Any]

    @staticmethod
    def of(environment: gymnasium.Env[Any, Any], names: Sequence[str]) -> Actions:
        """Return the actions of an environment.

        Raises: ConfigError for another action space, or a wrong number of names.
        """
        from gymnasium.spaces import Discrete, Text

        space = environment.action_space
        if isinstance(space, Text):
            if names:
                raise ConfigError("--actions names actions of a discrete space, but these are texts; remove it")
            return Actions(None, 0, space)
        if not isinstance(space, Discrete):
            raise ConfigError(
                f"the action space {space} is neither Discrete nor Text; wrap the environment in one that takes texts, "
                "or write a class for rollout.environment"
            )
        number, start = int(space.n), int(space.start)
        if names and (len(names) != number or len({name.lower() for name in names}) != number):
            raise ConfigError(f"--actions has {len(set(names))} names, and the environment has {number} actions")
        return Actions(list(names) or [str(start + place) for place in range(number)], start, space)

    def read(self, text: str) -> object | None:
        """Return the last action in a text, None if there is none."""
        if self.names is None:
            stripped = text.strip()
            return stripped if self.space.contains(stripped) else None
        # Longest first: a name may begin with another one.
        longest_first = sorted(enumerate(self.names), key=lambda numbered: -len(numbered[1]))
        alternatives = "|".join(f"(?P<a{place}>{re.escape(name)})" for place, name in longest_first)
        *_, found = [None, *re.finditer(rf"(?<![\w-])(?:{alternatives})(?!\w)", text, re.IGNORECASE)]
        # By the group, not the text: the letter ſ matches s, and is another one in lower case.
        return None if found is None else self.start + int(str(found.lastgroup)[1:])

    def instruction(self) -> str:
        """Return the default instruction."""
        return "" if self.names is None else f"Answer each turn with one action: {', '.join(self.names)}."

    def reminder(self) -> str:
        """Return the answer to a text without an action."""
        if self.names is None:
            return f"This is no text of {self.space}. Answer again."
        return f"No action was found. {self.instruction()}"


def _make(name: str, arguments: Mapping[str, JsonValue]) -> gymnasium.Env[Any, Any]:
    import gymnasium

    try:
        return cast("gymnasium.Env[Any, Any]", gymnasium.make(name, **cast("dict[str, Any]", dict(arguments))))
    except Exception as error:  # errors of the library, or of the environment's own module
        raise ConfigError(
            f"gymnasium has no environment {name} with these arguments: {describe(error)}; install its package, name "
            "it as module:id, or set --arguments"
        ) from error


def _first(environment: gymnasium.Env[Any, Any], name: str, seed: int) -> str:
    """Return the first observation of a seed as text.

    Raises: ConfigError if the environment fails, such as render_mode=human without its package.
    """
    try:
        observation, _ = environment.reset(seed=seed)
        return _shown(environment, observation)
    except Exception as error:  # errors of the environment's own code
        raise ConfigError(
            f"the environment {name} cannot start with seed {seed}: {describe(error)}; install its package, or set "
            "render_mode and others in --arguments"
        ) from error


def _shown(environment: gymnasium.Env[Any, Any], observation: object) -> str:
    """Return an observation as text: the environment's drawing with render_mode=ansi, else JSON."""
    if environment.render_mode == "ansi":
        # Terminals show the player's place in colour; brackets show it in plain text.
        return re.sub(r"\x1b\[[\d;]+m(.*?)\x1b\[0?m", r"[\1]", str(environment.render())).strip("\n")
    if isinstance(observation, str):
        return observation
    return json.dumps(to_plain(_listed(observation)))


def _listed(value: object) -> object:
    """Return an observation with lists in place of arrays."""
    if isinstance(value, Mapping):
        return {str(name): _listed(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_listed(entry) for entry in value]
    return value.tolist() if hasattr(value, "tolist") else value
