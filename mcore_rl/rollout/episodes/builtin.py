"""Built-in episodes: with tools, and with an environment (such as a user or a game) that answers every turn."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mcore_rl.config.functions import load_function
from mcore_rl.data.chat.messages import answer_content, message_images, text_of
from mcore_rl.data.json_text import as_json_text
from mcore_rl.rollout.episodes.history import report_of
from mcore_rl.rollout.episodes.limits import EpisodeLimitError
from mcore_rl.rollout.episodes.session import EpisodePrompt, Session
from mcore_rl.rollout.tools.parsers import MalformedCall, ToolCall
from mcore_rl.types.chat import ChatMessage, ContentPart

STEP = "step(action) -> (observation, reward, done)"


class Episode(Protocol):
    """Interaction of the model for one prompt. One object serves all concurrent episodes of an engine."""

    async def run(self, session: Session, prompt: EpisodePrompt) -> object:
        """Run one episode. Returns None (graders compute the reward), a finite number, a dict with `score`, or an
        EpisodeResult."""


class ToolEpisode:
    """Episode in which the model may call tools and sees their results. It ends with a turn without calls."""

    async def run(self, session: Session, prompt: EpisodePrompt) -> None:
        ids = prompt.token_ids
        while True:
            sampled = await session.generate(ids)
            # Calls of a truncated turn are ignored: a truncated call may look like a complete one.
            if sampled.finish_reason != "stop" or not (calls := session.parse(sampled).calls):
                return
            # Some templates render only one call per turn. The others are reported to the model in the first answer.
            rest: Sequence[ToolCall | MalformedCall] = ()
            if not session.parallel_calls:
                calls, rest = calls[:1], calls[1:]
            answers = await asyncio.gather(*(self._answer(session, call, n) for n, call in enumerate(calls)))
            if rest:
                text = f"{text_of(answers[0])}\n\n{report_of(rest)}"
                answers[0]["content"] = answer_content(text, message_images(answers[0]))
            ids = session.next_prompt(answers)

    @staticmethod
    async def _answer(session: Session, call: ToolCall | MalformedCall, number: int) -> ChatMessage:
        limit = session.limits.config.max_tool_calls_per_turn
        content: str | list[ContentPart]
        if isinstance(call, MalformedCall):
            session.count_malformed_call()
            content = call.answer
        elif number >= limit:
            content = f"Error: a turn may call {limit} tools, and this call was not executed."
        else:
            content = (await session.call(call.name, call.arguments)).content
        answer: ChatMessage = {"role": "tool", "name": call.name or "unknown", "content": content}
        if call.id:
            answer["tool_call_id"] = call.id
        return answer


class EnvironmentEpisode:
    """Episode in which every turn of the model is an action for an environment of the user.

    `environment` names a class, which is constructed for each episode with the row's `prompt` and `options`. Its
    methods may be async: step(action) -> (observation, reward, done), and optionally reset() -> observation or None
    before the first turn, score() -> number or dict with `score` at the end (replaces graders), and close().
    """

    def __init__(self, environment: str, options: Mapping[str, object]) -> None:
        self._make = load_function("rollout.environment", environment)
        self._options = dict(options)

    async def run(self, session: Session, prompt: EpisodePrompt) -> object:
        environment = await _called(self._make, prompt=prompt, **self._options)
        try:
            with contextlib.suppress(EpisodeLimitError):  # an episode that reached a limit is scored, too
                await self._play(environment, session, prompt)
            return await _called(environment.score) if hasattr(environment, "score") else None
        finally:
            if hasattr(environment, "close"):
                await _called(environment.close)

    @staticmethod
    async def _play(environment: Any, session: Session, prompt: EpisodePrompt) -> None:
        ids = prompt.token_ids
        if hasattr(environment, "reset"):
            first = await _called(environment.reset)
            if first is not None:
                ids = session.render([*prompt.messages, {"role": "user", "content": as_json_text(first)}])
        done = False
        while not done:
            sampled = await session.generate(ids)
            # A truncated action is not an action.
            if sampled.finish_reason != "stop":
                return
            observation, reward, done = _step(await _called(environment.step, sampled.text))
            session.reward(reward)
            if not done:
                ids = session.next_prompt([{"role": "user", "content": observation}])


def _step(returned: object) -> tuple[str, float, bool]:
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise TypeError(f"the environment's step returned {type(returned).__name__}; it must be {STEP}")
    observation, reward, done = returned
    return as_json_text(observation), float(reward), bool(done)


async def _called(function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Call a user's function. Synchronous functions run in a thread, since they may be slow."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
