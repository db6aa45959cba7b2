"""Long responses of a step with drafts and without, from the same seeds, and the acceptance by position of drafts.

The responses are equal, so the ratio of the rates is the speed-up. The unit is CPU seconds of the engine's process,
which excludes other load. The engines alternate, each in its own process. The models are tiny, in float32.

ngram: the model is random. Its responses repeat themselves at a low temperature, as code and quotations do, and hardly
at temperature 1. mtp: the layer predicts some of the model's tokens (draft_model.py). A draft runs the layer four
times, as much work as one pass of the model's four layers, so drafts are slower here. Published models with such a
layer have 46 to 61 others.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.children import PipedChild, run_command
from benchmarks.isolation import ROOT
from benchmarks.result import Result
from benchmarks.rollout.engine_loop import PROMPT_TOKENS, VOCABULARY, write_model
from benchmarks.sizes import size
from mcore_rl.config.sampling import MTP, NGRAM, NO_DRAFTS
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


TEXTS = {
    NGRAM: ((0.3, "repetitive", ">= 1.2"), (1.0, "hardly repetitive", ">= 0.9")),
    MTP: ((0.3, "temperature 0.3", ">= 1.0"), (1.0, "temperature 1", ">= 1.0")),
}
"""Temperatures, descriptions and aims by rollout.draft."""


def loads(draft: str) -> Iterator[Load]:
    for temperature, text, aim in TEXTS[draft]:
        for running in (1, 4):
            name = f"{running} responses" if running > 1 else "response"
            yield Load(f"{draft}: the last {name}, {text}", (LONGEST,) * running, temperature, aim)
        yield Load(f"{draft}: {BATCH} lognormal lengths, {text}", _lognormal(), temperature, aim)


def run() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="mcore_rl_drafts_") as directory:
        predictable = write_model(directory, "glm4_moe", "--mtp")
        run_command([sys.executable, "-m", "benchmarks.rollout.draft_model", predictable], ROOT)
        return [*_rows(NGRAM, write_model(directory)), *_rows(MTP, predictable)]


def _rows(draft: str, model: str) -> list[Result]:
    children = {each: PipedChild(_serve, model, each) for each in (NO_DRAFTS, draft)}
    try:
        return [
            _row(load, draft, [_measure(children, draft, load) for _ in range(ROUNDS + 1)][1:]) for load in loads(draft)
        ]
    finally:
        for child in children.values():
            child.kill()


def _measure(children: dict[str, PipedChild], draft: str, load: Load) -> dict[str, Measured]:
    """Run a load on both engines, one after the other. Raises: RuntimeError if their responses differ."""
    found = {}
    for each, child in children.items():
        child.send(load)
        found[each] = child.recv(Measured)
    if found[draft].responses != found[NO_DRAFTS].responses:
        raise RuntimeError(f"{load.name}: responses with drafts differ from those without")
    return found


def _row(load: Load, draft: str, rounds: list[dict[str, Measured]]) -> Result:
    ratio = statistics.median(each[draft].rate / each[NO_DRAFTS].rate for each in rounds)
    without = statistics.median(each[NO_DRAFTS].rate for each in rounds)
    drafts = rounds[0][draft].drafts  # every round has the same responses, and so the same drafts
    assert drafts is not None
    accepted = ", ".join(f"{each:.0%}" for each in drafts.accepted / np.maximum(drafts.verified, 1))
    share = 100 * drafts.accepted.sum() / rounds[0][draft].tokens
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
