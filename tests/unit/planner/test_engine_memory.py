"""Memory of an engine rank beside weights and KV cache: sampling, routed experts, and copies in host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.config import load_config
from mcore_rl.config.roles import ModelRole
from mcore_rl.engines.sglang.sampled_rows import SampledRows, sample_rows
from mcore_rl.planner.engine import EngineRank, _rounded_weights, engine_rank, tensor_bytes
from mcore_rl.planner.model_size import bound_rows
from mcore_rl.resolved.layout import model_arguments
from mcore_rl.resolved.model import policy_config
from mcore_rl.weights.slices.engine_layout import EngineLayout
from model_converters.mapping.table import BoundRow, Row
from model_converters.mapping.transforms import Same

VOCABULARY = 129_280
MakeRank = Callable[..., EngineRank]


@pytest.fixture(scope="module")
def rank() -> MakeRank:
    """Return a function that plans an engine rank of DeepSeek-V3 with changed rollout keys."""
    return _make_rank([])


def _make_rank(overrides: list[str]) -> MakeRank:
    config = load_config("configs/dapo_deepseek_v3_671b.yaml", overrides)
    hf_config, _ = policy_config(ModelRole.policy(config.actor, config.model))
    rows, arguments = bound_rows(hf_config, torch.bfloat16), model_arguments(hf_config)
    neutral = replace(config.rollout, validation_top_p=1.0, max_concurrent_requests=100)

    def of(
        element_bytes: int = 2, captures_routing: bool = False, float32_head: bool = False, **changes: Any
    ) -> EngineRank:
        return engine_rank(
            replace(neutral, **changes),
            config.cluster,
            rows,
            arguments,
            element_bytes=element_bytes,
            cuda=True,
            captures_routing=captures_routing,
            float32_head=float32_head,
        )

    return of


@pytest.mark.parametrize("tp", [8, 32])  # every rank samples from the whole vocabulary
@pytest.mark.parametrize(
    ("engine", "element_bytes", "validation", "per_logit"),
    [
        ("vllm", 2, {}, 14),
        ("vllm", 4, {}, 12),
        ("vllm, float32_head", 2, {}, 12),
        ("vllm", 2, {"top_p": 0.7, "top_k": 5, "min_p": 0.1}, 14),  # truncates in place
        ("sglang", 2, {}, 8),
        ("sglang", 2, {"top_p": 0.7}, 36),
        ("sglang", 2, {"top_k": 5}, 36),
        ("sglang", 2, {"top_k": 0}, 8),
        ("sglang", 2, {"min_p": 0.1}, 36),
        ("sglang", 2, {"repetition_penalty": 1.1}, 12),
    ],
)
def test_engine_rank_samples_all_logits_of_each_row(
    rank: MakeRank, tp: int, engine: str, element_bytes: int, validation: dict[str, float], per_logit: int
) -> None:
    keys: dict[str, Any] = {f"validation_{name}": value for name, value in validation.items()}
    engine, _, head = engine.partition(", ")
    keys |= {"engine": engine, "tp": tp, "float32_head": bool(head)}
    few, many = (rank(element_bytes, max_concurrent_requests=rows, **keys).workspace_bytes for rows in (200, 300))
    assert many - few == 100 * VOCABULARY * per_logit


def test_engine_rank_of_sglang_sorts_few_rows_with_more_memory_each(rank: MakeRank) -> None:
    def truncating(rows: int) -> int:
        plain = rank(engine="sglang", max_concurrent_requests=rows)
        return (
            rank(engine="sglang", max_concurrent_requests=rows, validation_top_p=0.7).workspace_bytes
            - plain.workspace_bytes
        )

    assert truncating(127) == 127 * VOCABULARY * (48 - 8)
    # 127 of 128 running rows still need more than 128 rows at once.
    assert truncating(128) == VOCABULARY * (127 * 48 - 128 * 8)
    assert truncating(200) == 200 * VOCABULARY * (36 - 8)


def test_engine_rank_of_vllm_counts_penalties_beside_its_fraction(rank: MakeRank) -> None:
    plain, penalized = rank(), rank(validation_repetition_penalty=1.1)
    assert penalized.kv_cache_bytes == plain.kv_cache_bytes
    assert penalized.total_bytes - plain.total_bytes == 100 * VOCABULARY * 14


def test_engine_rank_counts_masks_of_sampling_sets(rank: MakeRank) -> None:
    keys = {"keep_sampling_mask": True, "top_p": 0.9}
    row = 100 * VOCABULARY
    assert rank(**keys).unprofiled_bytes - rank().unprofiled_bytes == 2 * row
    # SGLang also sorts, with 48 bytes per logit instead of 8.
    sglang, overlap = (rank(engine="sglang", overlap_schedule=overlap, **keys) for overlap in (False, True))
    assert sglang.workspace_bytes - rank(engine="sglang").workspace_bytes == (48 - 8 + 2) * row
    assert overlap.workspace_bytes - sglang.workspace_bytes == row


@pytest.mark.parametrize(("draft", "drafting"), [("ngram", 0), ("mtp", 1)])
def test_engine_rank_of_vllm_counts_the_logits_of_drafts(rank: MakeRank, draft: str, drafting: int) -> None:
    row = VOCABULARY * 14
    plain, few, many = rank(), *(rank(draft=draft, draft_tokens=4, draft_below=below) for below in (16, 60))
    # vLLM's profile has two rows for each of 100 requests.
    assert few.workspace_bytes - plain.workspace_bytes == many.workspace_bytes - plain.workspace_bytes == 100 * row
    assert few.unprofiled_bytes == 0  # 100 + 15 * 4 rows
    assert many.unprofiled_bytes == (100 + 59 * 4 + 59 * drafting - 200) * row
    penalized = rank(draft=draft, draft_tokens=4, draft_below=60, validation_repetition_penalty=1.1)
    assert penalized.unprofiled_bytes - many.unprofiled_bytes == (100 + 59 * 4 + 59 * drafting) * row
    fewer_tokens = rank(draft=draft, draft_tokens=4, draft_below=60, max_batched_tokens=300)
    assert fewer_tokens.unprofiled_bytes == (300 + 59 * drafting - 200) * row


def test_engine_rank_with_draft_layers_has_their_weights_and_cache() -> None:
    trained = _make_rank(["actor.mtp_loss_coefficient=0.1"])
    without, drafting = trained(), trained(draft="mtp")
    assert without.weights_bytes == trained(draft="ngram").weights_bytes
    experts, tp = 256 * 3 * 2048 * 7168, 32
    difference = drafting.weights_bytes - without.weights_bytes
    # Two bytes per parameter; attention, shared expert and the undivided projection are a few percent.
    assert 2 * (experts / tp + 2 * 7168**2) < difference < 2.15 * (experts / tp + 2 * 7168**2)
    assert (drafting.kv_bytes_per_token, without.kv_bytes_per_token) == (62 * 576 * 2, 61 * 576 * 2)


def test_sampled_rows_stay_within_the_planned_bytes() -> None:
    num_rows, vocabulary = 4, 4096
    probs = torch.rand(num_rows, vocabulary).softmax(-1)
    ones = torch.ones(num_rows)
    rows = SampledRows(torch.arange(num_rows), torch.arange(num_rows), 50 * ones.long(), 0.7 * ones, 0.0 * ones)
    greatest = max(_live_bytes(lambda: sample_rows(probs, rows, truncate=True)))
    # The noise of a CPU is computed in chunks, whose size does not depend on the number of rows.
    assert greatest + probs.nbytes <= 36 * probs.numel()


def test_engine_rank_of_sglang_keeps_the_experts_of_its_cache(rank: MakeRank) -> None:
    captures = rank(captures_routing=True, engine="sglang")
    tokens = captures.kv_cache_bytes / captures.kv_bytes_per_token
    assert captures.routing_bytes == pytest.approx(tokens * 61 * 8 * 4)
    assert rank(engine="sglang").routing_bytes == rank(captures_routing=True).routing_bytes == 0


def test_engine_rank_of_vllm_keeps_weights_in_powers_of_two(rank: MakeRank) -> None:
    vllm, sglang = rank(), rank(engine="sglang")
    assert sglang.kept_bytes == sglang.weights_bytes == vllm.weights_bytes
    # Experts are 448 and 224 MiB per layer, so 512 and 256 are allocated; embedding and head each 55.2 MiB, so 64.
    assert vllm.kept_bytes - vllm.weights_bytes > 58 * (96 << 20) + 2 * (8 << 20)
    assert vllm.kept_bytes < 1.2 * vllm.weights_bytes


def test_kept_weights_of_a_layers_experts_are_one_allocation() -> None:
    name, shape = "experts.fc1.weight", (20, 5)
    row = Row(mcore=name + "{e}", hf=("{e}.gate",), shapes=(shape,), transform=Same(), axis="etp", num_experts=3)
    experts = [
        BoundRow(row, mcore=f"{name}{e}", hf=(f"{e}.gate",), dtype=torch.bfloat16, group="layer.0", layer=0, expert=e)
        for e in range(3)
    ]
    # Three experts of 100 elements on two ranks: 300 bytes on each, which rounds up to 512 and not to 3 x 128.
    assert _rounded_weights(tensor_bytes(experts, EngineLayout(2), 2).values()) == 512


def _live_bytes(call: Callable[[], object]) -> list[int]:
    """Return the bytes of the storages that operations in `call` created and that live after each operation."""
    sizes: dict[int, int] = {}
    holders: dict[int, int] = {}
    history: list[int] = []

    def drop(storage: int) -> None:
        holders[storage] -= 1

    class Track(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    sizes[storage._cdata] = storage.nbytes()
                    holders[storage._cdata] = holders.get(storage._cdata, 0) + 1
                    weakref.finalize(tensor, drop, storage._cdata)
            history.append(sum(size for storage, size in sizes.items() if holders[storage] > 0))
            return result

    with Track():
        call()
    return history
