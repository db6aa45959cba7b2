"""CPU seconds per token of our loop on SGLang, outside the model's forward pass: with one step per command, with
several, and with the overlap schedule.

The engine process and the rank are counted, by their process time, while all requests decode. The model is tiny, in
float32, on CPU, where nothing runs beside the preparation of a batch: this is the price of the overlap schedule, not
its gain.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.children import PipedChild
from benchmarks.result import Result, SkippedError
from benchmarks.rollout.engine_loop import PROMPT_TOKENS, VOCABULARY, write_model
from benchmarks.sizes import size
from mcore_rl.config.rules.engine_support import SGLANG_VERSION, sglang_version
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.loop import STEPS_PER_CALL
from mcore_rl.types import GenerationRequest, SamplingOptions

if TYPE_CHECKING:
    from mcore_rl.engines.sglang.engine import SglangEngine

RUNNING = size((1, 16, 64), (2,))
TOKENS, ROUNDS = size((192, 5), (8, 1))
"""Measured tokens per request, and rounds."""
RANK, MEASURED_RANK = "mcore_rl.engines.sglang.rank", "benchmarks.rollout.sglang_rank"
"""Module of the engine's ranks, and the module that is started instead."""
WARM_UP = 2 * STEPS_PER_CALL
"""Steps after which all requests decode."""
WAYS = {"one step": (False, 1), "steps": (False, STEPS_PER_CALL), "overlap": (True, STEPS_PER_CALL)}
"""Overlap schedule, and steps per command."""


@dataclass(frozen=True)
class Cost:
    """CPU microseconds per token: engine process, rank outside the forward pass, forward pass."""

    engine: float
    rank: float
    forward: float

    @property
    def outside(self) -> float:
        return self.engine + self.rank


def run() -> list[Result]:
    if sglang_version() != SGLANG_VERSION:
        raise SkippedError("needs .venv-sglang: make sglang")
    with tempfile.TemporaryDirectory(prefix="mcore_rl_schedules_") as directory:
        model = write_model(directory)
        engines = {overlap: PipedChild(_serve, model, overlap) for overlap in (False, True)}
        try:
            rounds = [
                {(way, n): _ask(engines[overlap], n, limit) for n in RUNNING for way, (overlap, limit) in WAYS.items()}
                for _ in range(ROUNDS + 1)
            ][1:]
        finally:
            for engine in engines.values():
                engine.kill()
    results = []
    for n in RUNNING:
        one, several, overlap = ([each[way, n] for each in rounds] for way in WAYS)
        results.append(_row(f"{n} running, {STEPS_PER_CALL} steps per command, beside one", several, one))
        results.append(_row(f"{n} running, overlap schedule, beside no overlap", overlap, several))
    return results


def _row(name: str, costs: Sequence[Cost], limits: Sequence[Cost]) -> Result:
    ours, limit = (statistics.median(each.outside for each in measured) for measured in (costs, limits))
    note = f"CPU time per token outside the forward pass. Ours: {_parts(costs)}; beside it: {_parts(limits)}"
    return Result(name, ours, limit, "us/token", ours / limit, note=note)


def _parts(costs: Sequence[Cost]) -> str:
    medians = {part: statistics.median(getattr(each, part) for each in costs) for part in vars(costs[0])}
    return ", ".join(f"{part} {microseconds:.1f} us" for part, microseconds in medians.items())


def _ask(engine: PipedChild, running: int, limit: int) -> Cost:
    """Request a measurement from the process of an engine. Raises: ChildError."""
    engine.send((running, limit))
    return engine.recv(Cost)


def _serve(pipe: Pipe, model: str, overlap: bool) -> None:
    from mcore_rl.engines.settings import EngineSettings
    from mcore_rl.engines.sglang import processes
    from mcore_rl.engines.sglang.engine import SglangEngine

    start: Any = processes.Child

    def start_measured(command: Sequence[str], *arguments: Any, **keywords: Any) -> Any:
        return start([part.replace(RANK, MEASURED_RANK) for part in command], *arguments, **keywords)

    processes.Child = start_measured  # type: ignore[misc,assignment]
    os.environ["OMP_NUM_THREADS"] = "1"
    config = RolloutConfig(
        engine="sglang",
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=TOKENS + 4 * WARM_UP,
        max_concurrent_requests=max(RUNNING),
        kv_cache_gib=0.25,
        overlap_schedule=overlap,
    )
    # Without an end token, every response has the requested length.
    engine = SglangEngine(EngineSettings(model, config, dtype="float32", seed=1, timeout_seconds=600))
    while True:
        pipe.send(_measure(engine, *pipe.recv()))


def _measure(engine: SglangEngine, running: int, limit: int) -> Cost:
    """Measure while `running` requests decode; none of them ends."""
    rng = np.random.default_rng(1)
    sampling = SamplingOptions(TOKENS + 4 * WARM_UP)
    prompts = [rng.integers(3, VOCABULARY, PROMPT_TOKENS).astype(np.int32) for _ in range(running)]
    engine.submit([GenerationRequest(str(i), prompt, i, sampling) for i, prompt in enumerate(prompts)])
    for _ in range(WARM_UP // limit):
        engine.step(limit)
    own, (rank, forward) = time.process_time(), engine._ranks.call("spent")[0]
    tokens = 0
    while tokens < running * TOKENS:
        tokens += sum(len(delta.token_ids) for delta in engine.step(limit)[0])
    own_after, (rank_after, forward_after) = time.process_time(), engine._ranks.call("spent")[0]
    engine.abort(engine.running_ids)
    seconds = own_after - own, rank_after - rank - (forward_after - forward), forward_after - forward
    return Cost(*(1e6 * each / tokens for each in seconds))
