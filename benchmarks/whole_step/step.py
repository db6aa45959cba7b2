"""A whole training step compared with TRL: 32 prompts x 8 samples, one update, the demo's model of 1.8 M parameters.

Our side is a normal run: vLLM generates, graders grade, Megatron ranks recompute log-probabilities and update, and the
weights are synced through shared memory, all through Ray. TRL's side is GRPOTrainer with Hugging Face generate in its
own environment (scripts/setup_trl.sh). Both sides alternate step by step, with the same response lengths. TRL has as
many threads as we have trainer ranks, one or two (data parallel). We have one engine per trainer rank; engines and
ranks have one thread each, and engines are idle while ranks train.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.asynchronous.training import Shape
from benchmarks.asynchronous.training import measure as measure_ahead
from benchmarks.children import LineProgram, run_command
from benchmarks.isolation import ROOT
from benchmarks.result import Result, SkippedError, shares
from benchmarks.whole_step.ours import measure
from benchmarks.whole_step.task import (
    LONGEST,
    MEDIAN_TOKENS,
    PROMPTS,
    RESPONSES,
    SAMPLES,
    WARM_UP,
    WORKLOADS,
    LengthWorkload,
    lengths,
)

PEER_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
POSITIONS = 1024
"""Maximum sequence length of the model, in tokens."""
MAX_STALENESS = 1
AHEAD = Shape(PROMPTS, SAMPLES, RESPONSES, int(MEDIAN_TOKENS), LONGEST, steps=16, warm_up=4)
"""Shape of the asynchronous run, whose engine samples responses ahead of the trainer."""


def run() -> list[Result]:
    """Run the benchmark. Raises: SkippedError if TRL's environment is absent."""
    if not PEER_PYTHON.exists():
        raise SkippedError("TRL's environment .venv-trl is absent; scripts/setup_trl.sh creates it")
    with tempfile.TemporaryDirectory(prefix="mcore_rl_whole_step_") as directory:
        task = write_task(Path(directory) / "task")
        results = []
        for ranks in (1, 2):
            ours, theirs = _side_by_side(task, Path(directory) / f"run{ranks}", ranks)
            end = 0
            for workload in WORKLOADS:
                end += workload.steps
                # The first steps of each workload warm up.
                counted = slice(end - workload.steps + WARM_UP, end)
                results.append(_compare(workload, ranks, ours[counted], theirs[counted]))
        # After the loops, `counted` and `theirs` are the steps of the last (long-tailed) workload with two ranks.
        return [*results, _ahead(task, Path(directory) / "ahead", theirs[counted])]


def _side_by_side(task: Path, run_dir: Path, ranks: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return the seconds per phase of every step, ours and TRL's. After each of our steps, TRL runs the same step."""
    theirs: list[dict[str, float]] = []
    with ExitStack() as stack:
        peers = [stack.enter_context(trl(task, index, threads=ranks)) for index in range(len(WORKLOADS))]
        turns = iter([peer for peer, workload in zip(peers, WORKLOADS, strict=True) for _ in range(workload.steps)])
        ours = measure(task, run_dir, ranks=ranks, between=lambda: theirs.append(next(turns).ask()))
    return ours, theirs


def _compare(
    workload: LengthWorkload, ranks: int, ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]
) -> Result:
    """Report the step of median duration of each side. The ratio is the median over pairs (our step, the TRL step after
    it), because on a busy machine both slow down together."""
    our, their = _typical(ours), _typical(theirs)
    ratio = statistics.median(peer["step"] / own["step"] for own, peer in zip(ours, theirs, strict=True))
    # TRL's phases are nested: generation is a part of scoring, and both are a part of the step.
    scoring = their["generate and score"] - their["generate"]
    training = their["step"] - their["generate and score"]
    own_parts = [(phase, our[phase]) for phase in ("generate", "logp", "update", "weight_sync")]
    own_parts.insert(1, ("rest of rollout", our["rollout"] - our["generate"]))
    peer_parts = [("generate", their["generate"]), ("score", scoring), ("update", training)]
    tokens = int(statistics.median(int(lengths(workload, step).sum()) for step in range(WARM_UP, workload.steps)))
    threads = f"{ranks} trainer rank{'s' * (ranks > 1)} / TRL {ranks} thread{'s' * (ranks > 1)}"
    note = (
        f"{RESPONSES} responses, {tokens} tokens; the ratio is TRL's time over ours\n"
        f"ours: {shares(own_parts, our['step'])}\n"
        f"TRL:  {shares(peer_parts, their['step'])}"
    )
    return Result(f"{workload.name}, {threads}", our["step"], their["step"], "s", ratio, workload.aim, note)


def _ahead(task: Path, run_dir: Path, theirs: Sequence[dict[str, float]]) -> Result:
    """Measure an asynchronous run with an engine on its own core and lengths of the same distribution. It does not
    alternate with TRL, because its rollouts do not stop between steps."""
    overrides = [f"rollout.max_staleness={MAX_STALENESS}", "actor.tokens_per_microbatch=8192"]
    ours = measure_ahead(AHEAD, task, run_dir, overrides)
    their = _typical(theirs)["step"]
    note = (
        f"ours is the mean of {AHEAD.steps - AHEAD.warm_up} steps; the trainer waits {ours.trainer_idle:.0%} of the "
        f"time, the engine {ours.engine_idle:.0%}; staleness {ours.mean_staleness:.2f} on average, "
        f"{ours.max_staleness:.0f} at most"
    )
    name = f"lognormal, up to {LONGEST}, max_staleness {MAX_STALENESS} on 2 cores / TRL 2 threads"
    return Result(name, ours.step, their, "s", their / ours.step, ">= 3.0", note)


def _typical(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the step of median duration."""
    return sorted(steps, key=lambda step: step["step"])[len(steps) // 2]


def write_task(directory: Path) -> Path:
    """Write the demo's model and prompts, with positions for the longest responses, and a tokenizer whose end token is
    not in the model's vocabulary, so that it is never sampled."""
    command = [sys.executable, str(ROOT / "scripts" / "demo_task.py"), "--out", str(directory)]
    run_command(command, ROOT)
    config = directory / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": POSITIONS}))
    (directory / "model" / "generation_config.json").unlink()  # with it, <eos> would end our responses
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    # The id of the added token lies beyond the model's vocabulary.
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    tokenizer.save_pretrained(directory / "endless_tokenizer")
    return directory


@contextmanager
def trl(task: Path, workload: int, *, threads: int) -> Iterator[LineProgram]:
    """Start TRL (benchmarks.whole_step.trl_peer) for one workload and wait until it is ready for its first step. Each
    answer of the program contains the seconds per phase of one step."""
    inputs = [str(task / "model"), str(task / "train.jsonl")]
    command = [str(PEER_PYTHON), "-m", "benchmarks.whole_step.trl_peer", *inputs, str(workload)]
    settings = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # TRL also prints to stdout; LineProgram passes lines that are not JSON objects on to stderr.
    peer = LineProgram("TRL's process", command, ROOT, {**os.environ, **settings})
    try:
        found = peer.answer()["threads"]
        assert found == threads, f"TRL runs {found} threads, not {threads}"
        yield peer
    finally:
        peer.kill()
