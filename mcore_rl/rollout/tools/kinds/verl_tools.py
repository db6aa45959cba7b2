"""Support of verl's tool classes.

In verl's versions of 2026, an instance exists for one call: create, execute, release. Earlier versions kept it for the
episode and called calc_reward at its end; select this with `lifecycle: episode` in the YAML.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from mcore_rl.config.functions import describe
from mcore_rl.rollout.tools.interface import EpisodeState, Tool, ToolResult, number_of, result_of
from mcore_rl.rollout.tools.schemas import Schema

LIFECYCLES = ("call", "episode")


class UserTool(Protocol):
    """Object of a class in verl's format. Its methods may be async; calc_reward(instance, **kwargs) is optional."""

    def create(self, **kwargs: object) -> object: ...

    def execute(self, instance: str, arguments: dict[str, object], **kwargs: object) -> object: ...

    def release(self, instance: str, **kwargs: object) -> object: ...


def is_verl_tool(kind: type) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("create", "execute", "release"))


class VerlTool(Tool):
    """Adapter of a tool in verl's format."""

    def __init__(self, tool: UserTool, schema: Schema, lifecycle: str = "call") -> None:
        self.schema = schema
        self._tool = tool
        self._name = schema["function"]["name"]
        self._per_call = lifecycle == "call"

    async def call(self, episode: EpisodeState, arguments: dict[str, object]) -> ToolResult:
        if not self._per_call:
            instance = episode.state.get(self._name)
            if not isinstance(instance, str):
                instance = episode.state[self._name] = await self._create(episode)
            return await self._execute(episode, instance, arguments)
        instance = await self._create(episode)
        # The instance is released in any case. An error of release only adds to the result of a successful call.
        try:
            outcome = await self._execute(episode, instance, arguments)
        except BaseException:
            await self._release(episode, instance)
            raise
        try:
            await self._release(episode, instance)
        except Exception as error:  # any error of a user's class; the result is still valid
            return replace(outcome, error=f"release raised {describe(error)}")
        return outcome

    async def close_episode(self, episode: EpisodeState) -> float | None:
        instance = episode.state.pop(self._name, None)
        if not isinstance(instance, str):
            return None
        try:
            kwargs = episode.kwargs_of(self._name, "calc_reward_kwargs")
            calc_reward = getattr(self._tool, "calc_reward", None)
            return None if calc_reward is None else number_of(await _awaited(calc_reward(instance, **kwargs)))
        finally:
            await self._release(episode, instance)

    async def close(self) -> None: ...

    async def _create(self, episode: EpisodeState) -> str:
        given = episode.kwargs_of(self._name, "create_kwargs")
        created = await _awaited(self._tool.create(**_create_kwargs(self._tool.create, given)))
        instance = created[0] if isinstance(created, tuple) else created
        if not isinstance(instance, str):
            raise TypeError(f"create returned {type(instance).__name__} instead of an instance's id")
        return instance

    async def _execute(self, episode: EpisodeState, instance: str, arguments: dict[str, object]) -> ToolResult:
        kwargs = episode.kwargs_of(self._name, "execute_kwargs")
        if _takes(self._tool.execute, "agent_data"):
            kwargs["agent_data"] = episode.agent_data
        return result_of(await _awaited(self._tool.execute(instance, arguments, **kwargs)))

    async def _release(self, episode: EpisodeState, instance: str) -> None:
        await _awaited(self._tool.release(instance, **episode.kwargs_of(self._name, "release_kwargs")))


def _create_kwargs(create: Callable[..., object], given: dict[str, object]) -> dict[str, object]:
    """Pass the arguments in both of verl's forms, as far as `create` accepts them: as the keyword `create_kwargs`, and
    as separate keywords."""
    spread = {key: value for key, value in given.items() if key not in ("instance_id", "create_kwargs")}
    whole: dict[str, object] = {"create_kwargs": given} if _takes(create, "create_kwargs") else {}
    return whole | {key: value for key, value in spread.items() if not whole or _takes(create, key)}


def _takes(function: Callable[..., object], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


async def _awaited(value: object) -> object:
    return await value if inspect.isawaitable(value) else value
