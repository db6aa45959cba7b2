"""Episodes behind the gateway on vLLM, compared with the same turns as coroutines, and memory of open sessions.

The unit is CPU seconds of the engine's process and of the gateway's. The programs send plain HTTP requests from a third
process, which does not count: their cost depends on their client. The overhead of a call is what the two processes
compute outside the steps of the engine, compared with coroutines: other arrival times change the batches of the steps,
which are the same code.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from benchmarks.result import Result, compare
from benchmarks.rollout.engine_loop import write_model
from benchmarks.sizes import size
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.episodes.single_turn import Attempt, AttemptBatch
from mcore_rl.rollout.gateway.wire import GatewayAddress
from mcore_rl.types import Completion, Delta, EpisodeOutcome, GenerationRequest, Prompt, SamplingOptions
from mcore_rl.types.chat import ChatMessage

if TYPE_CHECKING:
    from mcore_rl.engines.vllm.engine import VllmEngine
    from mcore_rl.rollout.episodes.builtin import Episode
    from mcore_rl.rollout.episodes.player import EpisodePlayer
    from mcore_rl.rollout.episodes.session import EpisodePrompt, Session
    from mcore_rl.rollout.loop import EngineLoop

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
CONCURRENT, SESSIONS, ROUNDS, OPEN_SESSIONS = size((64, 192, 3, 1000), (4, 4, 1, 8))
# Turns of agents have some hundred tokens. The overhead of a call grows with its conversation.
TURNS, TURN_TOKENS, PROMPT_TOKENS, RESPONSE_TOKENS = size((3, 448, 96, 1400), (2, 14, 96, 100))
NOT_SERVED: Any = None
"""All requests have sessions."""
HELD_TOKENS = 16
"""Tokens of a turn of a session that is kept open."""
MORE: ChatMessage = {"role": "user", "content": "Go on, please, with the next part of the problem."}
MIB = 1 << 20


def run() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="mcore_rl_gateway_") as directory:
        options = ("--set", "vocab_size=1280", "--set", "max_position_embeddings=1536")
        return _measure(write_model(directory, "qwen3_moe", *options))


def _measure(model: str) -> list[Result]:
    from mcore_rl.engines.settings import EngineSettings
    from mcore_rl.engines.vllm.engine import VllmEngine
    from mcore_rl.rollout.episodes.load import FunctionEpisode
    from mcore_rl.rollout.gateway.episode import GatewayEpisode
    from mcore_rl.rollout.gateway.link import GatewayLink
    from mcore_rl.rollout.loop import EngineLoop

    os.environ["OMP_NUM_THREADS"] = "1"
    config = RolloutConfig(
        episode="gateway",
        max_concurrent_episodes=max(SESSIONS, OPEN_SESSIONS),
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=RESPONSE_TOKENS,
        max_turn_tokens=TURN_TOKENS,
        max_turns=TURNS,
        max_concurrent_requests=CONCURRENT,
        max_episode_seconds=120.0,  # then the episodes of a session that failed end with an error
        kv_cache_gib=0.5,
    )
    engine = VllmEngine(EngineSettings(model, config, dtype="float32", seed=1, timeout_seconds=600))
    steps = _StepClock(engine)
    loop = EngineLoop(engine)
    # A daemon: the loop never ends, and must not keep the process alive.
    threading.Thread(target=loop.serve, daemon=True).start()
    alone = _player(FunctionEpisode(_conversation, {}), loop, config)
    episode = GatewayEpisode(config)
    served = _player(episode, loop, config)
    with _gateway() as (address, gateway), _programs(address) as programs:
        episode.link = served.run(GatewayLink.connect(address, NOT_SERVED))
        rounds = []
        for number in range(ROUNDS + 1):
            pair = [lambda: _cost(alone, steps, None), lambda: _cost(served, steps, gateway)]
            found = [way() for way in (pair if number % 2 else reversed(pair))]
            rounds.append(found if number % 2 else found[::-1])
        memory = _memory(served, programs, gateway)
    rates = [(a.tokens / a.seconds, b.tokens / b.seconds) for a, b in rounds[1:]]
    # Both values of a round see the same load.
    ratio, rate = statistics.median(b / a for a, b in rates), statistics.median(a for a, _ in rates)
    calls = SESSIONS * TURNS
    overhead = statistics.median(1000 * (b.outside - a.outside) / calls for a, b in rounds[1:])
    lengths = f"{TURN_TOKENS // 7} to {TURN_TOKENS} tokens"
    note = f"{SESSIONS} sessions of {TURNS} turns with {lengths}, {CONCURRENT} decoded at a time"
    return [
        Result("episodes behind the gateway", ratio * rate, rate, "tok/CPU s", ratio, ">= 0.9", note),
        compare("a call through the gateway", overhead, 3.0, "ms", "<= 1"),
        compare(f"{OPEN_SESSIONS} open sessions", memory, 300.0, "MiB", "<= 1"),
    ]


@dataclass(frozen=True)
class _Cost:
    tokens: int
    seconds: float
    outside: float
    """Part of `seconds` outside the steps of the engine."""


class _StepClock:
    """Counts the CPU seconds of the steps of an engine."""

    def __init__(self, engine: VllmEngine) -> None:
        self.seconds, self._step = 0.0, engine.step
        engine.step = self._timed  # type: ignore[method-assign]

    def _timed(self, limit: int = 1, max_tokens: float = math.inf) -> tuple[list[Delta], list[Completion]]:
        began = time.thread_time()
        try:
            return self._step(limit, max_tokens)
        finally:
            self.seconds += time.thread_time() - began


def _player(episode: Episode, loop: EngineLoop, config: RolloutConfig) -> EpisodePlayer:
    from mcore_rl.data.chat.conversation import Conversation
    from mcore_rl.rollout.episodes.context import EpisodeContext
    from mcore_rl.rollout.episodes.player import EpisodePlayer

    tokenizer = _tokenizer()
    player = EpisodePlayer(episode, loop, config)
    stops = [int(tokenizer.eos_token_id)]
    player.context = EpisodeContext(tokenizer, Conversation(tokenizer, (), stops), stop_ids=frozenset(stops))
    return player


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs" / "models" / "gsm8k_tiny")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _turn_tokens(row: int, turn: int) -> int:
    """Return the length of a turn, which differs between turns. Otherwise many turns of the coroutines would end in the
    same step of the engine, which programs never reach, and share the next prefill and one wake-up of their thread."""
    shortest = TURN_TOKENS // 7
    return shortest + (1009 * row + 337 * turn) % (TURN_TOKENS - shortest + 1)


async def _conversation(session: Session, prompt: EpisodePrompt) -> float:
    """Make the same calls as the programs."""
    ids = prompt.token_ids
    for turn in range(TURNS):
        await session.generate(ids, {"max_response_tokens": _turn_tokens(prompt.row, turn)})
        if turn + 1 < TURNS:
            ids = session.next_prompt([MORE])
    return 0.0


def _attempts(count: int) -> list[Attempt]:
    from mcore_rl.data.chat.conversation import Conversation

    conversation, attempts = Conversation(_tokenizer()), []
    for number in range(count):
        messages: list[ChatMessage] = [
            {"role": "user", "content": f"Anna has {number} apples and buys {number % 7} more."}
        ]
        ids = np.array(conversation.prompt_ids(messages), np.int32)
        prompt = Prompt(number, ids, "", "", "", messages=messages)
        attempts.append(Attempt(GenerationRequest(f"{number}", ids, number, SamplingOptions(RESPONSE_TOKENS)), prompt))
    return attempts


def _cost(player: EpisodePlayer, steps: _StepClock, gateway: psutil.Process | None) -> _Cost:
    """Return tokens and CPU seconds of the engine's and the gateway's process."""
    outcomes: list[EpisodeOutcome] = []

    def end(place: int, outcome: EpisodeOutcome | None) -> None:
        assert outcome is not None  # nothing withdraws attempts
        assert outcome.error is None, outcome.error
        outcomes.append(outcome)

    attempts = _attempts(SESSIONS)
    began, in_steps = time.process_time() + _cpu(gateway), steps.seconds
    player.play(AttemptBatch(attempts, lambda: None, end))
    seconds = time.process_time() + _cpu(gateway) - began
    sampled = sum(int((t.versions >= 0).sum()) for outcome in outcomes for t in outcome.trajectories)
    return _Cost(sampled, seconds, seconds - (steps.seconds - in_steps))


def _cpu(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


def _memory(player: EpisodePlayer, programs: Connection, gateway: psutil.Process) -> float:
    """Return the MiB by which the engine's and the gateway's process grow with open sessions after their last turn."""
    programs.send("hold")
    own, before = psutil.Process(), 0
    before = own.memory_info().rss + gateway.memory_info().rss
    attempts = _attempts(OPEN_SESSIONS)
    playing = threading.Thread(
        target=player.play, args=(AttemptBatch(attempts, lambda: None, lambda place, outcome: None),)
    )
    playing.start()
    assert programs.recv() == "held"
    grown = own.memory_info().rss + gateway.memory_info().rss - before
    programs.send("release")
    playing.join()
    return grown / MIB


@contextmanager
def _gateway() -> Iterator[tuple[GatewayAddress, psutil.Process]]:
    """Start a gateway in a process of its own."""
    with _process(_serve) as (connection, process):
        yield connection.recv(), process


@contextmanager
def _programs(address: GatewayAddress) -> Iterator[Connection]:
    """Start the process of the programs."""
    with _process(_work, address) as (connection, _):
        yield connection


@contextmanager
def _process(target: Any, *arguments: object) -> Iterator[tuple[Connection, psutil.Process]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours, psutil.Process(process.pid)
    finally:
        process.kill()
        process.join()


def _serve(connection: Connection) -> None:
    from mcore_rl.rollout.gateway.server import GatewayServer

    with GatewayServer("policy", "127.0.0.1", 0, "127.0.0.1") as server:
        connection.send(server.address)
        threading.Event().wait()


def _work(connection: Connection, address: GatewayAddress) -> None:
    """Take sessions and play their turns. After "hold", keep sessions open after the last turn until "release"."""
    asyncio.run(_Programs(connection, address).run())


class _Programs:
    def __init__(self, connection: Connection, address: GatewayAddress) -> None:
        self._connection, self._address = connection, address
        self._held, self._holds, self._release = 0, False, asyncio.Event()

    async def run(self) -> None:
        import httpx

        threading.Thread(target=self._listen, args=(asyncio.get_running_loop(),), daemon=True).start()
        async with httpx.AsyncClient(base_url=self._address.url, timeout=600) as client:
            headers = {"Authorization": f"Bearer {self._address.token}"}
            async with asyncio.TaskGroup() as running:  # a session that fails ends this process
                while True:
                    answer = await client.post("/sessions", json={"seconds": 30}, headers=headers)
                    if answer.status_code == httpx.codes.OK:
                        running.create_task(self._play(answer.json()))

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            match self._connection.recv():
                case "hold":
                    self._holds = True
                case "release":
                    loop.call_soon_threadsafe(self._release.set)

    async def _play(self, session: dict[str, Any]) -> None:
        import httpx

        # Every program has its own client. A shared one looks at all its connections for each request.
        url = f"{self._address.url}/sessions/{session['id']}"
        async with httpx.AsyncClient(base_url=url, timeout=600, verify=False) as client:
            await self._take_turns(client, session)
            owner = {"Authorization": f"Bearer {session['owner_key']}"}
            (await client.delete(url, headers=owner)).raise_for_status()

    async def _take_turns(self, client: Any, session: dict[str, Any]) -> None:
        headers, messages = {"Authorization": f"Bearer {session['key']}"}, list(session["row"]["messages"])
        for turn in range(TURNS):
            # Only the conversations of open sessions take memory, not the time to sample them.
            limit = HELD_TOKENS if self._holds else _turn_tokens(session["row"]["row"], turn)
            body = {"model": "policy", "messages": messages, "max_tokens": limit}
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            answer.raise_for_status()
            if turn + 1 < TURNS:
                said = answer.json()["choices"][0]["message"]
                messages += [{"role": "assistant", "content": said["content"]}, MORE]
        if self._holds:
            self._held += 1
            if self._held == OPEN_SESSIONS:
                self._connection.send("held")
            await self._release.wait()
