"""Our engine loop on vLLM with continuous requests, compared with static batches and with vLLM's `LLM.generate`.

The model is tiny, in float32, so that overhead dominates a step. The unit is CPU seconds of the generating process,
which excludes other load. The variants alternate, each in its own process.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.children import PipedChild, run_command
from benchmarks.isolation import ROOT
from benchmarks.result import Result
from benchmarks.sizes import size
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.types import GenerationRequest, SamplingOptions

if TYPE_CHECKING:
    from mcore_rl.engines.vllm.engine import VllmEngine
    from mcore_rl.types import Completion

BATCH, BATCHES, ROUNDS = size((32, 8, 5), (2, 2, 1))
LONGEST, MEDIAN, SIGMA = size((256, 48.0, 0.8), (8, 4.0, 0.8))
PROMPT_TOKENS, VOCABULARY = 24, 96
RUNNING = ((32, ">= 2.0"), (64, ">= 2.8"))
"""Concurrent requests, and the minimum ratio."""
TokensAndSeconds = tuple[int, float]
"""Tokens, and CPU seconds."""


def run() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="mcore_rl_loop_") as directory:
        model = write_model(directory)
        ours, theirs = PipedChild(_serve_ours, model), PipedChild(_serve_vllm, model)
        try:
            rounds = [{"ours": _ask(ours, "whole"), "vllm": _ask(theirs, "whole"), "batches": _ask(ours, "batches")}
                      | {str(n): _ask(ours, f"{n} running") for n, _ in RUNNING}
                      for _ in range(ROUNDS + 1)]  # fmt: skip
            own = _ask(ours, "own cost")
        finally:
            ours.kill()
            theirs.kill()
    # The first round warms up.
    rates = [{way: tokens / seconds for way, (tokens, seconds) in each.items()} for each in rounds[1:]]
    results = [_row(rates, f"{n} running, beside batches of {BATCH}", str(n), "batches", aim) for n, aim in RUNNING]
    results.append(_row(rates, "a whole batch, beside LLM.generate", "ours", "vllm", ">= 0.95"))
    milliseconds = 1000 * own[1] / own[0]
    note = f"CPU time of a step of {BATCH} requests outside vLLM's engine core"
    return [*results, Result("the loop's own cost", milliseconds, 1.0, "ms/step", milliseconds, "<= 1.0", note)]


def _row(rates: list[dict[str, float]], name: str, ours: str, limit: str, aim: str) -> Result:
    ratio = statistics.median(each[ours] / each[limit] for each in rates)
    of_limit = statistics.median(each[limit] for each in rates)
    return Result(name, ratio * of_limit, of_limit, "tok/CPU s", ratio, aim)


def write_model(directory: str, family: str = "qwen3_moe", *options: str) -> str:
    """Write a tiny random model and return its directory. options: further ones of scripts/tiny_checkpoint.py."""
    model = f"{directory}/{family}"
    command = [sys.executable, str(ROOT / "scripts" / "tiny_checkpoint.py"), family, model]
    run_command([*command, "--set", "head_dim=32", "--set", "max_position_embeddings=512", *options], ROOT)
    return model


def lengths() -> np.ndarray:
    """Return lognormal response lengths: mean 63; nearly every batch has one above 200."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, BATCH * BATCHES)
    return np.clip(drawn, 1, LONGEST).astype(int)


def requests() -> list[GenerationRequest]:
    rng = np.random.default_rng(1)
    return [
        GenerationRequest(
            str(i), rng.integers(3, VOCABULARY, PROMPT_TOKENS).astype(np.int32), i, SamplingOptions(int(length))
        )
        for i, length in enumerate(lengths())
    ]


def _ask(child: PipedChild, variant: str) -> TokensAndSeconds:
    """Request a measurement from a child process. Raises: ChildError."""
    child.send(variant)
    tokens, seconds = child.recv(tuple)
    return tokens, seconds


def _answer(pipe: Pipe, ways: dict[str, Callable[[], TokensAndSeconds]]) -> None:
    while True:
        pipe.send(ways[pipe.recv()]())


def _timed(way: Callable[[], int]) -> TokensAndSeconds:
    """Measure a variant that returns its number of tokens."""
    started = time.process_time()
    tokens = way()
    return tokens, time.process_time() - started


def _serve_ours(pipe: Pipe, model: str) -> None:
    from mcore_rl.engines.settings import EngineSettings
    from mcore_rl.engines.vllm.engine import VllmEngine

    os.environ["OMP_NUM_THREADS"] = "1"
    config = RolloutConfig(
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=LONGEST,
        max_concurrent_requests=2 * BATCH,
        kv_cache_gib=0.25,
    )
    # Without an end token, every response has the requested length.
    engine = VllmEngine(EngineSettings(model, config, dtype="float32", seed=1, timeout_seconds=600))

    def batches(size: int) -> int:
        tokens, drawn = 0, requests()
        for start in range(0, len(drawn), size):
            done: list[Completion] = []
            engine.generate(drawn[start : start + size], done.append)
            tokens += sum(len(each.token_ids) for each in done)
        return tokens

    def continuous(running: int) -> int:
        """Keep `running` requests active until as many have ended as in the batches."""
        tokens, ended, drawn = 0, 0, requests()
        # Ids are unique per engine, and the requests start anew when all of them have been submitted.
        more = (replace(each, request_id=f"{turn}.{each.request_id}") for turn in itertools.count() for each in drawn)
        # As many completions as the batches have requests, from an engine that is always full.
        while ended < len(drawn):
            engine.submit(list(itertools.islice(more, running - engine.num_running)))
            deltas, completions = engine.step()
            tokens, ended = tokens + sum(len(delta.token_ids) for delta in deltas), ended + len(completions)
        engine.abort(engine.running_ids)  # the next variant starts with an idle engine
        return tokens

    ways: dict[str, Callable[[], TokensAndSeconds]] = {
        "whole": lambda: _timed(lambda: batches(2 * BATCH)),
        "batches": lambda: _timed(lambda: batches(BATCH)),
        "own cost": lambda: _own_cost(engine, lambda: continuous(BATCH)),
    }
    _answer(pipe, ways | {f"{n} running": lambda n=n: _timed(lambda: continuous(n)) for n, _ in RUNNING})


def _own_cost(engine: VllmEngine, work: Callable[[], int]) -> TokensAndSeconds:
    """Return the number of steps and their CPU seconds outside of vLLM's core."""
    get_output, inside, steps = engine._core.get_output, 0.0, 0

    def timed() -> object:
        nonlocal inside, steps
        started = time.process_time()
        output = get_output()
        inside, steps = inside + time.process_time() - started, steps + 1
        return output

    # Everything outside of this call is the cost of our loop.
    engine._core.get_output = timed
    started = time.process_time()
    work()
    total = time.process_time() - started
    engine._core.get_output = get_output
    return steps, total - inside


def _serve_vllm(pipe: Pipe, model: str) -> None:
    """Run unmodified vLLM in one process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,  # as in our engine: token ids in, token ids out
        max_model_len=PROMPT_TOKENS + LONGEST,
        max_num_seqs=2 * BATCH,
        kv_cache_memory_bytes=2**28,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )

    def whole() -> int:
        tokens, drawn = 0, requests()
        for start in range(0, len(drawn), 2 * BATCH):
            part = drawn[start : start + 2 * BATCH]
            prompts = [{"prompt_token_ids": each.token_ids.tolist()} for each in part]
            params = [
                SamplingParams(
                    temperature=1.0,
                    max_tokens=each.sampling.max_response_tokens,
                    ignore_eos=True,
                    seed=each.seed,
                    logprobs=0,
                    detokenize=False,
                )
                for each in part
            ]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            tokens += sum(len(each.outputs[0].token_ids) for each in outputs)
        return tokens

    _answer(pipe, {"whole": lambda: _timed(whole)})
