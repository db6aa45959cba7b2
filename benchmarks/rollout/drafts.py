"""Long responses of a step with drafts and without, from the same seeds, and the acceptance by position of drafts.

The responses are equal, so the ratio of the rates is the speed-up. The unit is CPU seconds of the engine's process,
which excludes other load. The model is tiny and random, in float32: its responses repeat themselves at a low
temperature, as code and quotations do, and hardly at temperature 1. The engines alternate, each in its own process.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.children import PipedChild
from benchmarks.result import Result
from benchmarks.rollout.engine_loop import PROMPT_TOKENS, VOCABULARY, write_model
from benchmarks.sizes import size
from mcore_rl.config.sampling import NGRAM, NO_DRAFTS
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.types import Completion, DraftCounts, GenerationRequest, SamplingOptions

if TYPE_CHECKING:
    from mcore_rl.engines.vllm.engine import VllmEngine

ROUNDS, LONGEST, BATCH = size((5, 384, 64), (1, 12, 4))
MEDIAN, SIGMA = size((48.0, 0.8), (4.0, 0.8))
DRAFT_TOKENS = 4
DRAFT_BELOW = size(16, 4)


@dataclass(frozen=True)
class Load:
    """Requests that start together; `lengths` are their response lengths."""

    name: str
    lengths: tuple[int, ...]
    temperature: float
    aim: str

    def requests(self) -> list[GenerationRequest]:
        rng = np.random.default_rng(1)
        prompts = rng.integers(3, VOCABULARY, (len(self.lengths), PROMPT_TOKENS)).astype(np.int32)
        return [
            GenerationRequest(str(i), prompt, i, SamplingOptions(length, temperature=self.temperature))
            for i, (prompt, length) in enumerate(zip(prompts, self.lengths, strict=True))
        ]


def _lognormal() -> tuple[int, ...]:
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, BATCH)
    return tuple(np.clip(drawn, 1, LONGEST).astype(int).tolist())


@dataclass(frozen=True)
class Measured:
    """tokens, seconds: tokens and CPU seconds of a load; `responses`: its tokens, by request; drafts: None without."""

    tokens: int
    seconds: float
    responses: dict[str, list[int]]
    drafts: DraftCounts | None

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def loads() -> Iterator[Load]:
    for temperature, text, aim in ((0.3, "repetitive", ">= 1.2"), (1.0, "hardly repetitive", ">= 0.9")):
        for running in (1, 4):
            name = f"the last {running} responses, {text}" if running > 1 else f"the last response, {text}"
            yield Load(name, (LONGEST,) * running, temperature, aim)
        yield Load(f"{BATCH} lognormal lengths, {text}", _lognormal(), temperature, aim)


def run() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="mcore_rl_drafts_") as directory:
        model = write_model(directory)
        children = {draft: PipedChild(_serve, model, draft) for draft in (NO_DRAFTS, NGRAM)}
        try:
            return [_row(load, [_measure(children, load) for _ in range(ROUNDS + 1)][1:]) for load in loads()]
        finally:
            for child in children.values():
                child.kill()


def _measure(children: dict[str, PipedChild], load: Load) -> dict[str, Measured]:
    """Run a load on both engines, one after the other. Raises: RuntimeError if their responses differ."""
    found = {}
    for draft, child in children.items():
        child.send(load)
        found[draft] = child.recv(Measured)
    if found[NGRAM].responses != found[NO_DRAFTS].responses:
        raise RuntimeError(f"{load.name}: responses with drafts differ from those without")
    return found


def _row(load: Load, rounds: list[dict[str, Measured]]) -> Result:
    ratio = statistics.median(each[NGRAM].rate / each[NO_DRAFTS].rate for each in rounds)
    without = statistics.median(each[NO_DRAFTS].rate for each in rounds)
    drafts = rounds[0][NGRAM].drafts  # every round has the same responses, and so the same drafts
    assert drafts is not None
    accepted = ", ".join(f"{each:.0%}" for each in drafts.accepted / np.maximum(drafts.verified, 1))
    share = 100 * drafts.accepted.sum() / rounds[0][NGRAM].tokens
    note = f"accepted at positions 1 to {DRAFT_TOKENS} of drafts: {accepted}; {share:.0f}% of the tokens were drafts"
    return Result(load.name, ratio * without, without, "tok/CPU s", ratio, load.aim, note)


def _serve(pipe: Pipe, model: str, draft: str) -> None:
    from mcore_rl.engines.settings import EngineSettings
    from mcore_rl.engines.vllm.engine import VllmEngine

    os.environ["OMP_NUM_THREADS"] = "1"
    config = RolloutConfig(
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=LONGEST,
        max_concurrent_requests=BATCH,
        kv_cache_gib=0.25,
    )
    if draft != NO_DRAFTS:
        config = replace(config, draft=draft, draft_tokens=DRAFT_TOKENS, draft_below=DRAFT_BELOW)
    # Without an end token, every response has the requested length.
    engine = VllmEngine(EngineSettings(model, config, dtype="float32", seed=1, timeout_seconds=600))
    while True:
        pipe.send(_generate(engine, pipe.recv()))


def _generate(engine: VllmEngine, load: Load) -> Measured:
    requests, done = load.requests(), list[Completion]()
    before, started = engine.draft_counts, time.process_time()
    engine.generate(requests, done.append)
    seconds = time.process_time() - started
    responses = {each.request_id: each.token_ids.tolist() for each in done}
    counts = None if before is None or engine.draft_counts is None else engine.draft_counts - before
    return Measured(sum(map(len, responses.values())), seconds, responses, counts)
