"""Engines of two ranks: each rank receives its part of an update, and failures of one rank are reported."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mcore_rl.errors import WorkerDiedError
from mcore_rl.types import GenerationRequest, SamplingOptions
from tests.contract.engines import (
    DELTA_NETS,
    DIVIDED_BY_TWO,
    EVERY_EXPERT,
    LATENT,
    MARKS,
    NEEDS_TORCHVISION,
    start_engine,
)
from tests.contract.hf_trainer import HFTrainer
from tests.contract.update_checks import (
    TINY_BUCKET,
    check_close,
    check_greedy,
    check_recovery,
    check_silent_rank,
    rank_processes,
)
from tests.selection import on_demand_unless
from tests.tiny_models import tiny_model

MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "heads of their own": ("qwen3", {"num_key_value_heads": 2, "head_dim": 32}, False),
    "one key-value head, whole experts": ("qwen3_moe", {"num_key_value_heads": 1, "head_dim": 32}, True),
    "biases, tied": ("qwen2", {"hidden_size": 128, "head_dim": 32, "tie_word_embeddings": True}, False),
    "slices of experts": ("mixtral", {"hidden_size": 128, "head_dim": 32}, False),
    "latent attention, whole experts": ("deepseek_v3", {"hidden_size": 128, **LATENT}, True),
}
"""Family, fields of the model, and whether the ranks keep whole experts (expert_parallel)."""
SGLANG_MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "slices of experts": ("qwen3_moe", DIVIDED_BY_TWO, False),
    "heads of their own": ("qwen3", DIVIDED_BY_TWO, False),
    "biases, tied": ("qwen2", {"hidden_size": 128, **DIVIDED_BY_TWO, "tie_word_embeddings": True}, False),
}
MODELS_OF = {"vllm": MODELS, "sglang": SGLANG_MODELS}
ALWAYS_TESTED = {"vllm": list(MODELS)[1:2], "sglang": list(SGLANG_MODELS)[:1]}
"""Shared key-value heads and whole experts; divided heads and experts."""


def _segments() -> set[str]:
    """Return the names of the engines' shared memory."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if any(word in name for word in ("cpushm", "psm_", "sglang", "sgl_shm"))}


def _leaked_segments(before: set[str]) -> set[str]:
    """Return the new segments that no living process has mapped: engines of concurrent tests own segments too."""
    new = _segments() - before
    maps = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended
            maps.append(path.read_text())
    return {name for name in new if not any(f"/dev/shm/{name}" in text for text in maps)}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (kind, name),
            id=f"{kind}-{name}",
            marks=[*MARKS[kind], *on_demand_unless(name in ALWAYS_TESTED[kind])],
        )
        for kind, models in MODELS_OF.items()
        for name in models
    ],
)
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield an engine of two ranks and a function that creates models for it."""
    kind, name = request.param
    family, changes, whole_experts = MODELS_OF[kind][name]
    before = _segments()

    def model(seed: int) -> Any:
        return tiny_model(family, seed=seed, **changes)

    directory = tmp_path_factory.mktemp("model")
    model(1).save_pretrained(directory)
    engine = start_engine(kind, directory, load_weights=False, tp=2, expert_parallel=whole_experts)
    try:
        yield engine, model
    finally:
        engine.shutdown()
    deadline = time.monotonic() + 60
    while left := _leaked_segments(before):  # a concurrent engine may not have mapped a new segment yet
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


@pytest.mark.parametrize("transport", ["shared_memory", "network"])
def test_update_two_ranks_receive_their_shards(two_ranks: Any, transport: str) -> None:
    engine, model = two_ranks
    trainer = HFTrainer(model(7), engine, TINY_BUCKET, 2, transport)
    for version in (1, 2):
        trainer.publish(version)
        check_greedy(engine, trainer.model, version)
        assert trainer.certify() > 10
        trainer.perturb(version)


def test_update_after_failure_on_both_ranks_is_complete(two_ranks: Any) -> None:
    """After an error, vLLM leaves answers of other ranks in its queues; the next call must not receive them."""
    engine, model = two_ranks
    trainer = HFTrainer(model(8), engine, TINY_BUCKET, 2)
    num_rounds = trainer.plan.num_rounds
    for received in (1, num_rounds // 2, num_rounds - 1):
        check_recovery(engine, trainer, received)


@pytest.fixture
def vllm_ranks(two_ranks: Any) -> Any:
    if two_ranks[0].kind != "vllm":
        pytest.skip("looks into vLLM")
    return two_ranks


def _fail_on(engine: Any, ranks: list[int], bucket_error: str) -> None:
    """Make loading fail on `ranks` in the middle of a bucket, like an error in vLLM. An empty list undoes it."""

    def change(wrapper: Any) -> None:
        worker = wrapper.worker

        loader = worker._loader

        def put(*box: Any) -> None:
            type(loader).put(loader, *box)
            raise LookupError(bucket_error)

        if worker.rank in ranks:
            loader.put = put
        else:
            vars(loader).pop("put", None)

    engine._engine.collective_rpc(change)


@pytest.mark.parametrize(("ranks", "named"), [([1], "rank 1 of 2"), ([0, 1], "rank 0, 1 of 2")])
def test_update_engine_error_names_ranks_and_is_raised_once(vllm_ranks: Any, ranks: list[int], named: str) -> None:
    engine, model = vllm_ranks
    trainer = HFTrainer(model(9), engine, TINY_BUCKET, 2)
    with trainer.sending(complete=False):
        engine.call("begin_update")
        trainer.receive(range(3))
        engine.call(_fail_on, ranks, "no such layer")
        with pytest.raises(WorkerDiedError) as caught:
            trainer.receive(range(3, trainer.plan.num_rounds))  # the first round may contain nothing for a rank
    assert f"the engine, {named} failed in `receive_bucket`" in str(caught.value)
    assert str(caught.value).endswith("LookupError: no such layer")
    engine.call(_fail_on, [], "")
    trainer.connect()
    trainer.publish(7)
    check_greedy(engine, trainer.model, 7)
    assert trainer.certify() > 10


def test_vllm_silent_rank_raises_in_time_and_disables_engine(vllm_ranks: Any) -> None:
    """Must be the last test of the engine: the engine is unusable afterwards. test_weight_sync.py tests SGLang."""
    check_silent_rank(vllm_ranks[0], 1, "routed_layers", "not every rank answered")


@pytest.mark.parametrize(
    ("family", "whole_experts"),
    [
        # test_families.py updates these families on one rank.
        pytest.param("qwen3_next", True, marks=on_demand_unless(False)),
        pytest.param("qwen3_5_moe_text", False, marks=NEEDS_TORCHVISION),
    ],
)
def test_update_delta_nets_on_two_ranks_are_close(family: str, whole_experts: bool, tmp_path: Path) -> None:
    """A rank keeps several parts of one tensor: its queries, keys and values of a convolution."""
    sizes = {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 2, **DELTA_NETS, **EVERY_EXPERT}

    def model(seed: int) -> Any:
        return tiny_model(family, seed=seed, **sizes)

    model(1).save_pretrained(tmp_path)
    engine = start_engine("vllm", tmp_path, load_weights=False, tp=2, expert_parallel=whole_experts, dtype="bfloat16")
    try:
        trainer = HFTrainer(model(8), engine, TINY_BUCKET, 2)
        for version in (1, 2):
            trainer.publish(version)
            check_close(engine, trainer.model, version)
            assert trainer.certify() > 10
            trainer.perturb(version)
    finally:
        engine.shutdown()


def _step_forever(engine: Any) -> None:
    while True:
        engine.call("step")


def test_sglang_killed_rank_ends_engine_and_is_named(two_ranks: Any) -> None:
    """Must be the last test of the engine. tests/e2e/test_hosts.py kills a rank of vLLM."""
    engine, model = two_ranks
    if engine.kind != "sglang":
        pytest.skip("kills a rank of SGLang")
    HFTrainer(model(10), engine, TINY_BUCKET, 2).publish(11)
    ranks = engine.call(rank_processes)
    engine.call("submit", [GenerationRequest("0", np.array([5, 6], np.int32), 0, SamplingOptions(30))])
    engine.call("step")
    os.kill(ranks[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="the engine: rank 1 "):
        _step_forever(engine)
    engine.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in ranks)
