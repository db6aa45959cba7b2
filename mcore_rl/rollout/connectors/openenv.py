"""Environments on an OpenEnv server: rollout.environment=...openenv:ServerEnvironment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import jsonschema

from mcore_rl.errors import ConfigError, DataError
from mcore_rl.rollout.connectors.interface import EVAL, RowRequest, part_of, row_of
from mcore_rl.rollout.connectors.libraries import import_library
from mcore_rl.rollout.episodes.session import EpisodePrompt
from mcore_rl.types.json import JsonObject, JsonValue

if TYPE_CHECKING:
    from openenv.core.client_types import StepResult
    from openenv.core.generic_client import GenericEnvClient

KIND = "openenv"
NUM_SEEDS = 1000
"""Number of rows without a limit."""
FIRST_EVAL_SEED = 10**6
SCHEMA_SECONDS = 30.0
NOT_SHOWN = ("done", "reward", "metadata")
"""Entries of an observation that the model does not see."""
import_library(KIND)


class OpenEnvRows:
    """Rows with a seed each, which the server receives when an episode starts."""

    def rows(self, request: RowRequest) -> Iterator[JsonObject]:
        """Same as Rows.rows. `name`: URL of the server. `arguments`: further arguments of its reset."""
        if not request.name.startswith(("http://", "https://")):
            raise ConfigError(f"{request.name} must be the URL of an OpenEnv server, such as http://127.0.0.1:8000")
        if request.actions:
            raise ConfigError("--actions has no effect on openenv, whose servers have a schema of actions; remove it")
        schema = _action_schema(request.name)
        instruction = request.prompt if request.prompt is not None else ActionText.of(schema).instruction()
        first = FIRST_EVAL_SEED if request.split == EVAL else 0
        source = urlsplit(request.name).netloc
        for seed in range(first, first + (request.limit or NUM_SEEDS)):
            reset = {"seed": seed, **request.arguments}
            part: JsonObject = {"url": request.name, "schema": schema, "reset": reset}
            yield row_of(KIND, source, [{"role": "user", "content": instruction}], part)


class ServerEnvironment:
    """Environment of the episode `environment`: each turn of the model is an action, each observation a user turn.

    Each episode has a connection of its own, so the server needs as many concurrent sessions as there are episodes. An
    action that does not match the server's schema is not sent: the model sees the mistake, with reward 0.
    `prompt` is a row of `mcore-rl rows openenv`.
    """

    def __init__(self, prompt: EpisodePrompt) -> None:
        part = part_of(prompt.extra_info, KIND)
        self._url, self._reset = str(part["url"]), cast("dict[str, JsonValue]", part["reset"])
        try:
            _check_schema(part["schema"])
        except ValueError as error:
            raise DataError(f"{error} in the row; write the rows again with `mcore-rl rows {KIND}`") from error
        self._actions = ActionText.of(cast(JsonObject, part["schema"]))
        self._client: GenericEnvClient | None = None

    async def reset(self) -> str:
        """Connect to the server and return the first observation."""
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(base_url=self._url)
        await self._client.connect()
        return _shown(await self._client.reset(**self._reset))

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Return observation, reward and whether the environment has ended."""
        assert self._client is not None, "reset comes first"
        try:
            chosen = self._actions.read(action)
        except ValueError as error:
            return f"This action is invalid: {error}. {self._actions.instruction()}", 0.0, False
        result = await self._client.step(chosen)
        return _shown(result), float(result.reward or 0.0), result.done

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


@dataclass(frozen=True)
class ActionText:
    """Actions of a server as texts. field: the only required property, which a plain text gives if it is a string or a
    number; None: actions are JSON objects."""

    schema: JsonObject
    field: str | None
    type: str | None

    @staticmethod
    def of(schema: JsonObject) -> ActionText:
        """Return the actions of a server. schema: JSON schema of its actions."""
        properties = cast("dict[str, JsonObject]", schema.get("properties") or {})
        named = [name for name in properties if name != "metadata"]
        required = cast("list[str]", schema.get("required") or named)
        kind = properties[required[0]].get("type") if len(required) == 1 and required[0] in properties else None
        if kind in ("string", "integer", "number"):
            return ActionText(schema, required[0], str(kind))
        return ActionText(schema, None, None)

    def read(self, text: str) -> JsonObject:
        """Return the action that a text gives.

        Raises: ValueError with the mistake.
        """
        action = self._parsed(text)
        try:
            jsonschema.validate(action, self.schema)
        except jsonschema.ValidationError as error:
            raise ValueError(error.message) from None
        return action

    def _parsed(self, text: str) -> JsonObject:
        if self.field is None:
            if (begin := text.find("{")) < 0:
                raise ValueError("it has no JSON object")
            try:
                action, _ = json.JSONDecoder().raw_decode(text, begin)
            except RecursionError:
                raise ValueError("its JSON is nested too deeply") from None
            return cast(JsonObject, action)
        if self.type == "string":
            return {self.field: text.strip()}
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
        if not numbers:
            raise ValueError("it has no number")
        return {self.field: int(numbers[-1]) if "." not in numbers[-1] else float(numbers[-1])}

    def instruction(self) -> str:
        """Return the default instruction."""
        if self.field is not None:
            return f"Answer each turn with one action: {self._described()}."
        return f"Answer each turn with one action, a JSON object of this schema: {json.dumps(self.schema)}"

    def _described(self) -> str:
        entry = cast("dict[str, JsonObject]", self.schema["properties"])[str(self.field)]
        return str(entry.get("description") or f"{self.field} ({self.type})").rstrip(".")


def _action_schema(url: str) -> JsonObject:
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/')}/schema", timeout=SCHEMA_SECONDS)
        answer.raise_for_status()
        schema = answer.json()["action"]
        _check_schema(schema)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{url} does not give the schema of its actions ({error}); start the OpenEnv server first, and give its URL"
        ) from error
    return cast(JsonObject, schema)


def _check_schema(schema: object) -> None:
    """Raise ValueError if a schema of actions is not a valid JSON schema of objects."""
    if not isinstance(schema, dict):
        raise ValueError(f"the schema of actions is {json.dumps(schema)} instead of an object")
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"the schema of actions is invalid: {error.message}") from None


def _shown(result: StepResult[Mapping[str, JsonValue]]) -> str:
    """Return an observation as text: its only string, or JSON."""
    entries = {name: value for name, value in result.observation.items() if name not in NOT_SHOWN}
    only = next(iter(entries.values())) if len(entries) == 1 else None
    return only if isinstance(only, str) else json.dumps(entries)
