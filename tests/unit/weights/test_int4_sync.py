"""Syncs with rollout.quantization=int4: words and scales equal those of whole tensors, wherever a trainer cuts them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mcore_rl.weights.int4 import PACKED_SUFFIX, SCALE_SUFFIX, quantise_into
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.verify import Comparison, compare
from model_converters.errors import LayoutError
from model_converters.mapping.layout import TrainLayout
from tests.tiny_models import tiny_fields
from tests.unit.weights import engine_boxes, transfer
from tests.unit.weights.delivery import Taken, Tensors
from tests.unit.weights.test_quantised_sync import bits, checkpoint_of, held_by
from tests.unit.weights.transfer import connected, receive_digests, sync_plan, update

SIZES = {"hidden_size": 192, "intermediate_size": 192, "moe_intermediate_size": 128, "num_hidden_layers": 2}
EXPERTS = tiny_fields("qwen3_moe", **{**SIZES, "num_experts": 4})
TP2, EP2 = EngineLayout(tp=2), EngineLayout(tp=2, expert_parallel=True)
CASES = {
    "one rank": (EXPERTS, TrainLayout(1), EngineLayout(), "A", "A"),
    "ep to whole experts": (EXPERTS, TrainLayout(2, ep=2), EP2, "AB", "AB"),
    "ep to slices": (EXPERTS, TrainLayout(2, ep=2), TP2, "AA", "AA"),
    "etp": (EXPERTS, TrainLayout(4, tp=2, ep=2, etp=2), EngineLayout(), "AAAA", "A"),
    "shared parameters": (EXPERTS, TrainLayout(3, shard_parameters=True), TP2, "AAA", "BB"),
    # Three ranks: two experts, two, none.
    "stacked experts": (EXPERTS, TrainLayout(3, shard_parameters=True, hf_tensors=True), TP2, "AAA", "BB"),
    "mixtral, pp": (tiny_fields("mixtral", **SIZES), TrainLayout(2, pp=2), EngineLayout(), "AB", "A"),
    "shared experts": (
        tiny_fields("deepseek_v3", **SIZES, n_routed_experts=4, head_dim=8),
        *(TrainLayout(4, tp=2, ep=2), EP2, "AABB", "AA"),
    ),
}
GROUP = 32
_generation = iter(range(10**6))


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return transfer.store()


def int4_plan(case: str, *, bucket_bytes: int = 40_000) -> SyncPlan:
    plan = sync_plan(*CASES[case], bucket_bytes=bucket_bytes)
    return replace(plan, dtype=torch.bfloat16, quantization="int4", quantization_group=GROUP)


def expected_tensors(plan: SyncPlan, checkpoint: Tensors) -> Tensors:
    """Quantise whole tensors of experts."""
    found = {}
    for bound in plan.shard_map.rows:
        for name in bound.hf:
            whole = checkpoint[name].to(bound.dtype)
            if bound.expert is None:
                found[name] = whole
                continue
            rows, columns = whole.shape
            words, scales = torch.zeros(rows, columns // 8).int(), torch.zeros(rows, columns // GROUP).bfloat16()
            quantise_into(whole, (words, scales), hf_name=name, dtype=torch.bfloat16, group=GROUP)
            found |= {name + PACKED_SUFFIX: words, name + SCALE_SUFFIX: scales}
    return found


def kept(plan: SyncPlan, rank: int, name: str, checkpoint: Tensors) -> engine_boxes.Box | None:
    """Return the part of a tensor that an engine rank keeps."""
    weight = name.removesuffix(PACKED_SUFFIX).removesuffix(SCALE_SUFFIX)
    part = engine_boxes.box(weight, tuple(checkpoint[weight].shape), dict(plan.hf_config), plan.engine_layout, rank)
    if part is None or weight == name:
        return part
    each = 8 if name.endswith(PACKED_SUFFIX) else GROUP
    return part[0], slice(part[1].start // each, part[1].stop // each)


def check_bits(plan: SyncPlan, taken: list[Taken], checkpoint: Tensors) -> None:
    """Check that each engine rank received its part of each tensor, bit for bit and every element once."""
    expected = expected_tensors(plan, checkpoint)
    for rank, boxes in enumerate(taken):
        parts = {name: kept(plan, rank, name, checkpoint) for name in expected}
        assert boxes.keys() == {name for name, part in parts.items() if part is not None}
        for name, received in boxes.items():
            values, counts = torch.zeros_like(expected[name]), torch.zeros(expected[name].shape)
            for start, box in received:
                place = tuple(slice(a, a + n) for a, n in zip(start, box.shape, strict=True))
                assert box.dtype == values.dtype
                values[place] = box
                counts[place] += 1
            part = parts[name]
            assert torch.equal(bits(values[part]), bits(expected[name][part])), (name, rank)
            assert int(counts[part].min()) == int(counts.max()) == 1, (name, rank)
            assert int(counts.sum()) == values[part].numel(), (name, rank)


@pytest.mark.parametrize("case", CASES)
def test_int4_update_equals_words_and_scales_of_whole_tensors(store: dist.TCPStore, case: str) -> None:
    plan = int4_plan(case)
    checkpoint = checkpoint_of(plan)
    with connected(plan, store, next(_generation)) as processes:
        taken, _, _ = update(processes, held_by(plan, checkpoint))
    assert plan.num_rounds > 3
    check_bits(plan, taken, checkpoint)


def test_digests_of_int4_tensors_detect_every_bit(store: dist.TCPStore) -> None:
    plan = int4_plan("ep to slices")
    checkpoint = checkpoint_of(plan)
    expected = expected_tensors(plan, checkpoint)
    with connected(plan, store, next(_generation)) as processes:
        digests = receive_digests(processes, held_by(plan, checkpoint))
    for rank, of_rank in enumerate(digests):
        boxes = plan.shard_map.boxes(rank)
        held = {name: expected[name][kept(plan, rank, name, checkpoint)].clone() for name in boxes}
        assert compare(of_rank, held.items(), boxes) == Comparison()
        for name in ("model.layers.1.mlp.experts.2.down_proj.weight" + each for each in (PACKED_SUFFIX, SCALE_SUFFIX)):
            changed = held[name].clone()
            bits(changed)[-1, -1] ^= 0x80
            assert compare(of_rank, (held | {name: changed}).items(), boxes) == Comparison({name})


@pytest.mark.parametrize("case", CASES)
def test_int4_experts_take_four_and_a_half_bits(case: str) -> None:
    plan = int4_plan(case)
    num_bytes = elements = 0
    for incoming in plan.incoming(range(len(plan.topology.buffers))).values():
        for each in (part for message in incoming.messages for part in message.slices if part.encoding.quantised):
            num_bytes += each.num_bytes
            elements += each.shape[0] * each.shape[1]
            assert ".experts." in each.hf_name
            assert "shared" not in each.hf_name
    assert 8 * num_bytes == 4.5 * elements


def test_trainer_cut_inside_a_group_is_rejected() -> None:
    sizes = tiny_fields("qwen3_moe", **{**SIZES, "moe_intermediate_size": 96, "num_experts": 4})
    plan = replace(
        sync_plan(sizes, TrainLayout(2, tp=2, etp=2), EngineLayout(), "AA", "A"),
        dtype=torch.bfloat16, quantization="int4", quantization_group=GROUP,
    )  # fmt: skip
    with pytest.raises(LayoutError, match="columns 0 to 48 are not whole groups of 32"):
        plan.outgoing(0)
