"""Episodes with a scripted model, a chat template and, on request, tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.chat.conversation import Conversation
from mcore_rl.rollout.episodes.builtin import Episode
from mcore_rl.rollout.episodes.context import EpisodeContext
from mcore_rl.rollout.episodes.load import FunctionEpisode
from mcore_rl.rollout.episodes.player import EpisodePlayer
from mcore_rl.rollout.episodes.single_turn import Attempt, AttemptBatch
from mcore_rl.rollout.journal import JournaledResponse, TokenJournal
from mcore_rl.rollout.tools.interface import ClosedEpisode, ToolResult
from mcore_rl.rollout.tools.parsers import ToolCallParser
from mcore_rl.types import EpisodeOutcome, GenerationRequest, Prompt, SamplingOptions
from tests.unit.data.chat import made
from tests.unit.rollout.episodes.scripted import Say, ScriptedEngine, served

QUESTION = [{"role": "user", "content": "q"}]


@dataclass
class FakeTools:
    """Fake tools: `look` returns the result of `answers` for the arguments, or sleeps if that is a number of
    seconds."""

    answers: Callable[[dict[str, Any]], ToolResult | float]
    calls: list[tuple[str, str, dict[str, Any], Mapping[str, Any]]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards of whole episodes."""

    async def call(
        self, episode_id: str, name: str, arguments: dict[str, Any], tools_kwargs: Mapping[str, Any]
    ) -> ToolResult:
        self.calls.append((episode_id, name, arguments, tools_kwargs))
        answer = self.answers(arguments)
        if isinstance(answer, ToolResult):
            return answer
        await asyncio.sleep(answer)
        return ToolResult("slept")

    async def close_episode(self, episode_id: str) -> ClosedEpisode:
        self.closed.append(episode_id)
        return ClosedEpisode(self.rewards)


@dataclass
class Stage:
    """An engine, its player, and the prompt of all attempts."""

    engine: ScriptedEngine
    player: EpisodePlayer
    tools: FakeTools | None
    prompt: Prompt
    tokenizer: Any
    tokens: int
    spans: list[tuple[str, float, float]]

    def attempts(self, count: int = 1, seed: int = 5) -> list[Attempt]:
        options = SamplingOptions(self.tokens)
        return [
            Attempt(GenerationRequest(f"train.0.{i}", self.prompt.token_ids, seed + i, options), self.prompt)
            for i in range(count)
        ]

    def play(
        self,
        count: int = 1,
        drawn: dict[str, JournaledResponse] | None = None,
        seed: int = 5,
        attempts: Sequence[Attempt] = (),
    ) -> list[EpisodeOutcome]:
        """Play `attempts`, or `count` attempts with consecutive seeds."""
        attempts = attempts or self.attempts(count, seed)
        outcomes: dict[int, EpisodeOutcome | None] = {}
        begun: list[None] = []
        self.player.play(AttemptBatch(attempts, lambda: begun.append(None), outcomes.__setitem__, drawn or {}))
        assert sorted(outcomes) == list(range(len(attempts)))
        assert len(begun) == len(attempts), "each has started once"
        return [outcome for place in range(len(attempts)) if (outcome := outcomes[place]) is not None]

    def text(self, outcome: EpisodeOutcome, which: int = 0) -> str:
        """Decode a whole trajectory, including special tokens."""
        trajectory = outcome.trajectories[which]
        return str(self.tokenizer.decode([*trajectory.prompt_ids.tolist(), *trajectory.token_ids.tolist()]))

    def trained_text(self, outcome: EpisodeOutcome, which: int = 0) -> str:
        trajectory = outcome.trajectories[which]
        assert trajectory.trained is not None
        return str(self.tokenizer.decode(trajectory.token_ids[trajectory.trained > 0].tolist()))


SetUp = Callable[..., Stage]
"""Fixture `stage`."""


@pytest.fixture
def stage() -> Iterator[SetUp]:
    """Build a stage: `say` is the model's script, `episode` an object with `run` or an async function."""
    with ExitStack() as stack:

        def set_up(
            say: Say,
            episode: Episode | Callable[..., Any],
            *,
            tools: FakeTools | None = None,
            template: str | None = made.STABLE,
            parser: str = "hermes",
            experts: bool = False,
            journal: TokenJournal | None = None,
            extra_info: dict[str, Any] | None = None,
            **rollout: object,
        ) -> Stage:
            config = RolloutConfig(
                **({"episode": "a.py:b", "max_prompt_tokens": 200, "max_response_tokens": 600} | rollout)
            )
            tokenizer = made.tokenizer(template)
            spans: list[tuple[str, float, float]] = []
            engine = ScriptedEngine(tokenizer, say, config, experts=experts)
            loop = stack.enter_context(served(engine, journal))
            player = EpisodePlayer(
                episode if hasattr(episode, "run") else FunctionEpisode(episode, {}),  # type: ignore[arg-type]
                loop,
                config,
                lambda name, start, end: spans.append((name, start, end)),
            )
            stack.callback(player.shutdown)
            schemas = [made.LOOK] if tools else []
            talk = Conversation(tokenizer, schemas, made.stop_ids(tokenizer))
            player.context = EpisodeContext(
                tokenizer,
                talk,
                tools,
                stop_ids=frozenset(made.stop_ids(tokenizer)),
                parser_of=lambda offered: ToolCallParser(parser, None, [dict(each) for each in offered]),
            )
            prompt = Prompt(
                0,
                np.array(talk.prompt_ids(QUESTION), np.int32),
                talk.render(QUESTION),
                "src",
                "42",
                extra_info or {},
                QUESTION,
            )
            return Stage(engine, player, tools, prompt, tokenizer, config.max_response_tokens, spans)

        yield set_up
