"""Episodes on vLLM: single turns as coroutines compared with single turns of the loop, and idle time of the engine
while a thousand conversations wait for slow tools.

The unit is CPU seconds of the process with engine, loop and episodes, in which the variants alternate.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.result import Result
from benchmarks.rollout.engine_loop import write_model
from benchmarks.sizes import size
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.episodes.single_turn import Attempt, AttemptBatch, Player
from mcore_rl.types import EpisodeOutcome, GenerationRequest, Prompt, SamplingOptions

if TYPE_CHECKING:
    from mcore_rl.rollout.episodes.player import EpisodePlayer
    from mcore_rl.rollout.episodes.session import EpisodePrompt, Session

PROMPT_TOKENS, VOCABULARY, TURN_TOKENS, CONCURRENT = size((24, 96, 48, 64), (24, 96, 4, 8))
SINGLE_TURNS, ROUNDS = size((512, 10), (8, 2))
CONVERSATIONS, TURNS, SLOWEST_TOOL_SECONDS = size((1000, 3, 2.0), (8, 2, 0.1))
WAITING_SHARE = 0.9
"""Fraction of conversations after whose end idle time is no longer measured, since too few requests are left."""


def run() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="mcore_rl_episodes_") as directory:
        return _measure(write_model(directory))


def _measure(model: str) -> list[Result]:
    from mcore_rl.engines.settings import EngineSettings
    from mcore_rl.engines.vllm.engine import VllmEngine
    from mcore_rl.rollout.episodes.load import FunctionEpisode
    from mcore_rl.rollout.episodes.player import EpisodePlayer
    from mcore_rl.rollout.episodes.single_turn import SingleTurnPlayer
    from mcore_rl.rollout.loop import EngineLoop

    os.environ["OMP_NUM_THREADS"] = "1"
    config = RolloutConfig(
        episode="benchmarks/rollout/episodes.py:_conversation",
        max_concurrent_episodes=CONVERSATIONS,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=TURNS * TURN_TOKENS + TURNS,
        max_turn_tokens=TURN_TOKENS,
        max_concurrent_requests=CONCURRENT,
        kv_cache_gib=0.5,
    )
    engine = VllmEngine(EngineSettings(model, config, dtype="float32", seed=1, timeout_seconds=600))
    loop = EngineLoop(engine)
    # A daemon: the loop never ends, and must not keep the process alive.
    threading.Thread(target=loop.serve, daemon=True).start()
    single = SingleTurnPlayer(loop, _NoText())
    one_turn = _with_context(EpisodePlayer(FunctionEpisode(_one_turn, {}), loop, config))
    talking = _with_context(EpisodePlayer(FunctionEpisode(_conversation, {}), loop, config))
    rounds = [_both(single, one_turn, single_first=bool(number % 2)) for number in range(ROUNDS + 1)][1:]
    # Both values of a round see the same load.
    ratio = statistics.median(as_episode / alone for alone, as_episode in rounds)
    alone = statistics.median(rate for rate, _ in rounds)
    idle = _idle_percent(talking, lambda: loop.busy_seconds)
    note = f"{CONVERSATIONS} of {TURNS} turns, tools of 0 to {SLOWEST_TOOL_SECONDS:g} s"
    return [
        Result("single turns as coroutines", ratio * alone, alone, "tok/CPU s", ratio, ">= 0.98"),
        Result("engine idle while tools are waited for", idle, 5.0, "%", idle, "<= 5", note),
    ]


class _NoText:
    def decode(self, token_ids: object, **_: object) -> str:
        return ""


def _with_context(player: EpisodePlayer) -> EpisodePlayer:
    from mcore_rl.data.chat.conversation import Conversation
    from mcore_rl.rollout.episodes.context import EpisodeContext

    conversation = Conversation.__new__(Conversation)
    conversation.tools = []
    player.context = EpisodeContext(_NoText(), conversation)
    return player


async def _one_turn(session: Session, prompt: EpisodePrompt) -> None:
    await session.generate(prompt.token_ids)


async def _conversation(session: Session, prompt: EpisodePrompt) -> None:
    ids, rng = prompt.token_ids, np.random.default_rng(session.seed)
    for turn in range(TURNS):
        ids = ids + (await session.generate(ids)).token_ids
        if turn + 1 < TURNS:
            # The tool. Its duration varies, so that conversations do not return to the engine all at once.
            await asyncio.sleep(rng.uniform(0, SLOWEST_TOOL_SECONDS))
            ids = [*ids, 5]  # the tool's answer, any token


def _attempts(count: int, tokens: int) -> list[Attempt]:
    rng = np.random.default_rng(1)
    attempts = []
    for number in range(count):
        ids = rng.integers(3, VOCABULARY, PROMPT_TOKENS).astype(np.int32)
        prompt = Prompt(number, ids, "", "", "")
        attempts.append(Attempt(GenerationRequest(f"{number}", ids, number, SamplingOptions(tokens)), prompt))
    return attempts


def _both(single: Player, one_turn: Player, *, single_first: bool) -> tuple[float, float]:
    """Return the tokens per CPU second of both players. The one that runs second benefits from warm caches."""
    if single_first:
        alone = _rate(single)
        return alone, _rate(one_turn)
    as_episode = _rate(one_turn)
    return _rate(single), as_episode


def _rate(player: Player) -> float:
    """Return tokens per CPU second."""
    outcomes: list[EpisodeOutcome] = []

    def end(place: int, outcome: EpisodeOutcome | None) -> None:
        assert outcome is not None  # nothing withdraws attempts
        outcomes.append(outcome)

    attempts = _attempts(SINGLE_TURNS, TURN_TOKENS)
    started = time.process_time()
    player.play(AttemptBatch(attempts, lambda: None, end))
    seconds = time.process_time() - started
    return sum(len(outcome.trajectories[0].token_ids) for outcome in outcomes) / seconds


def _idle_percent(player: Player, busy_seconds: Callable[[], float]) -> float:
    """Return the idle time of the engine in percent of the time in which conversations wait."""
    ended, at_most = 0, int(WAITING_SHARE * CONVERSATIONS)
    figures: list[tuple[float, float]] = []

    def end(place: int, outcome: object) -> None:
        nonlocal ended
        ended += 1
        if ended == at_most:
            figures.append((time.perf_counter(), busy_seconds()))

    started, busy = time.perf_counter(), busy_seconds()
    player.play(AttemptBatch(_attempts(CONVERSATIONS, TURNS * TURN_TOKENS + TURNS), lambda: None, end))
    (then, busy_then), *_ = figures
    return 100 * (1 - (busy_then - busy) / (then - started))
