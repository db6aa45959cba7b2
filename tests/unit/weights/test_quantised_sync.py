"""Syncs with rollout.quantization=fp8: codes and scales equal those of whole tensors, wherever a trainer cuts them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_rl.config.quantization import BLOCK
from mcore_rl.errors import PeerLostError, WeightSyncError
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.shard_map import ShardMap
from mcore_rl.weights.slices.totals import count
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.verify import Comparison, compare
from model_converters.errors import LayoutError
from model_converters.hf.quant import SCALE_SUFFIX, quantise
from model_converters.mapping.layout import TrainLayout
from tests.tiny_models import tiny_fields
from tests.unit.weights import engine_boxes, transfer
from tests.unit.weights.delivery import Taken, Tensors, trainer_tensors
from tests.unit.weights.test_slices import random_checkpoint, rows_of
from tests.unit.weights.test_transfer import drain
from tests.unit.weights.transfer import connected, receive_digests, sync_plan, update

# Blocks end where tp 2 cuts; otherwise they do not: 320 / 2 = 160 rows or columns, and heads of 64.
ALIGNED = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_hidden_layers": 2}
UNALIGNED = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 64, "num_hidden_layers": 2}
LATENT = {
    "q_lora_rank": 136,
    "kv_lora_rank": 144,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 8,
    "v_head_dim": 72,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "hidden_size": 200,
    "intermediate_size": 320,
    "moe_intermediate_size": 160,
    "n_routed_experts": 4,
    "num_hidden_layers": 2,
}
WHOLE_LATENT = {
    **LATENT,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
}
DENSE = tiny_fields("qwen3", **ALIGNED)
UNEVEN = tiny_fields("qwen2", **UNALIGNED, tie_word_embeddings=True)
EXPERTS = tiny_fields("qwen3_moe", **{**ALIGNED, "num_experts": 4, "moe_intermediate_size": 256})
UNEVEN_EXPERTS = tiny_fields("qwen3_moe", **{**UNALIGNED, "num_experts": 4, "moe_intermediate_size": 96})
TP2, EP2 = EngineLayout(tp=2), EngineLayout(tp=2, expert_parallel=True)
CASES = {
    "one rank": (DENSE, TrainLayout(1), EngineLayout(), "A", "A"),
    "one rank, small heads": (UNEVEN, TrainLayout(1), EngineLayout(), "A", "A"),
    "tp to tp": (DENSE, TrainLayout(2, tp=2), TP2, "AA", "AA"),
    "tp inside blocks": (UNEVEN, TrainLayout(2, tp=2), EngineLayout(), "AA", "A"),
    "tp beyond groups": (UNEVEN, TrainLayout(4, tp=4), EngineLayout(), "AABB", "A"),
    "tp and replicas, two engines": (UNEVEN, TrainLayout(4, tp=2), EngineLayout(), "AABB", "AB"),
    "heads on two engine ranks": (DENSE | {"num_key_value_heads": 1}, TrainLayout(1), TP2, "A", "BB"),
    "pp": (UNEVEN, TrainLayout(2, pp=2), EngineLayout(), "AB", "A"),
    "ep": (EXPERTS, TrainLayout(2, ep=2), EP2, "AB", "AB"),
    "ep to slices": (EXPERTS, TrainLayout(2, ep=2), TP2, "AA", "AA"),
    "etp inside blocks": (UNEVEN_EXPERTS, TrainLayout(2, tp=2, etp=2), EngineLayout(), "AA", "B"),
    "ep and etp": (UNEVEN_EXPERTS, TrainLayout(4, tp=2, ep=2, etp=2), EngineLayout(), "AAAA", "A"),
    "shared parameters": (UNEVEN, TrainLayout(3, shard_parameters=True), EngineLayout(), "AAA", "A"),
    "shared parameters and tp": (UNEVEN, TrainLayout(4, tp=2, shard_parameters=True), EngineLayout(), "AABB", "A"),
    "shared experts": (UNEVEN_EXPERTS, TrainLayout(4, ep=2, shard_parameters=True), EngineLayout(), "AAAA", "A"),
    "transformers": (UNEVEN, TrainLayout(3, shard_parameters=True, hf_tensors=True), EngineLayout(), "AAA", "A"),
    "transformers, experts": (
        UNEVEN_EXPERTS,
        *(TrainLayout(3, shard_parameters=True, hf_tensors=True), EngineLayout(), "AAB", "B"),
    ),
    "transformers, latent attention": (
        tiny_fields("deepseek_v3", **LATENT),
        *(TrainLayout(3, shard_parameters=True, hf_tensors=True), EngineLayout(), "AAA", "B"),
    ),
    "mixtral": (tiny_fields("mixtral", **UNALIGNED), TrainLayout(2, tp=2, etp=2), EngineLayout(), "AA", "A"),
    "deepseek_v2": (tiny_fields("deepseek_v2", **LATENT), TrainLayout(2, tp=2, etp=2), EngineLayout(), "AA", "A"),
    "deepseek_v3": (tiny_fields("deepseek_v3", **LATENT), TrainLayout(4, tp=2, ep=2), EngineLayout(), "AABB", "A"),
    "deepseek_v3 to tp": (tiny_fields("deepseek_v3", **WHOLE_LATENT), TrainLayout(2, pp=2), TP2, "AA", "BB"),
    "engine stages": (UNEVEN, TrainLayout(2, tp=2), EngineLayout(pp=2), "AA", "AB"),
    "glm4_moe": (
        tiny_fields("glm4_moe", **UNALIGNED, n_routed_experts=4, moe_intermediate_size=96),
        *(TrainLayout(2, tp=2, etp=2), EngineLayout(), "AA", "A"),
    ),
}
_generation = iter(range(10**6))


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return transfer.store()


def fp8_plan(case: str, *, bucket_bytes: int = 200_000, powers: bool = False) -> SyncPlan:
    plan = sync_plan(*CASES[case], bucket_bytes=bucket_bytes)
    return replace(plan, dtype=torch.bfloat16, quantization="fp8", power_of_two_scales=powers)


def checkpoint_of(plan: SyncPlan, seed: int = 3) -> Tensors:
    """Random tensors whose blocks have different maxima, with a block of zeros and one of very small values."""
    checkpoint = random_checkpoint(plan.rows, seed)
    for index, tensor in enumerate(checkpoint.values()):
        if tensor.dim() == 2:
            tensor *= torch.exp(torch.linspace(0, 3, tensor.shape[0]))[:, None]
            tensor *= torch.exp(torch.linspace(0, 2, tensor.shape[1]))[None, :]
            if index % 3 == 0:
                tensor[:BLOCK, :BLOCK] = 0
            if index % 3 == 1:
                tensor[:BLOCK, :BLOCK] *= 1e-38
    return checkpoint


def expected_tensors(plan: SyncPlan, checkpoint: Tensors) -> Tensors:
    """Quantise whole tensors, as an export does."""
    found = {}
    for bound in plan.shard_map.rows:
        for name in bound.hf:
            found[name] = checkpoint[name].to(bound.dtype)
            if bound.row.fp8:
                found[name], found[name + SCALE_SUFFIX] = quantise(found[name], power_of_two=plan.power_of_two_scales)
    return found


def held_by(plan: SyncPlan, checkpoint: Tensors) -> list[Tensors]:
    ranks = range(plan.train_layout.world_size)
    return [trainer_tensors(plan.rows, plan.train_layout, rank, checkpoint) for rank in ranks]


def kept(plan: SyncPlan, rank: int, name: str, expected: Tensors) -> engine_boxes.Box | None:
    """Return the part of a tensor that an engine rank keeps; for scales, the blocks of its part of the weight."""
    weight = name.removesuffix(SCALE_SUFFIX)
    part = engine_boxes.box(weight, tuple(expected[weight].shape), dict(plan.hf_config), plan.engine_layout, rank)
    if part is None or weight == name:
        return part
    return tuple(slice(each.start // BLOCK, -(-each.stop // BLOCK)) for each in part)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_bits(plan: SyncPlan, taken: list[Taken], expected: Tensors) -> None:
    """Check that each engine rank received its part of each tensor, bit for bit and every element once."""
    for rank, boxes in enumerate(taken):
        known = {}
        for name, whole in expected.items():
            part = kept(plan, rank % plan.engine_layout.num_ranks, name, expected)
            if part is None:
                continue
            known[name] = part
            values, counts = torch.zeros_like(whole), torch.zeros(whole.shape)
            for start, box in boxes[name]:
                place = tuple(slice(a, a + n) for a, n in zip(start, box.shape, strict=True))
                assert box.dtype == whole.dtype
                values[place] = box
                counts[place] += 1
            assert torch.equal(bits(values[part]), bits(whole[part])), (name, rank)
            assert int(counts[part].min()) == int(counts.max()) == 1, (name, rank)
            assert int(counts.sum()) == values[part].numel(), (name, rank)
        assert boxes.keys() == known.keys()
        planned = plan.shard_map.boxes(rank % plan.engine_layout.num_ranks)
        begins = {name: tuple(each.start for each in part) for name, part in known.items()}
        assert {name: start for name, ((start, _),) in planned.items()} == begins


@pytest.mark.parametrize("case", CASES)
def test_quantised_update_equals_codes_and_scales_of_whole_tensors(store: dist.TCPStore, case: str) -> None:
    plan = fp8_plan(case)
    checkpoint = checkpoint_of(plan)
    with connected(plan, store, next(_generation)) as processes:
        taken, _, _ = update(processes, held_by(plan, checkpoint))
    check_bits(plan, taken, expected_tensors(plan, checkpoint))


@pytest.mark.parametrize(("case", "bucket_bytes"), [("one rank", 100_000), ("ep and etp", 74_000), ("tp to tp", 10**6)])
@pytest.mark.parametrize("powers", [False, True])
def test_quantised_update_any_bucket_and_scale_format_arrives(
    store: dist.TCPStore, case: str, bucket_bytes: int, powers: bool
) -> None:
    plan = fp8_plan(case, bucket_bytes=bucket_bytes, powers=powers)
    assert (plan.num_rounds > 10) == (bucket_bytes < 10**6)
    with connected(plan, store, next(_generation)) as processes:
        for seed in (1, 2):
            checkpoint = checkpoint_of(plan, seed)
            taken, _, _ = update(processes, held_by(plan, checkpoint))
            check_bits(plan, taken, expected_tensors(plan, checkpoint))


def test_quantised_update_does_not_depend_on_the_dtype_of_parameters(store: dist.TCPStore) -> None:
    """Parameters in float32 are rounded to the dtype of the sync before they are quantised, and are not changed."""
    plan = fp8_plan("tp inside blocks")
    checkpoint = checkpoint_of(plan)
    held = held_by(plan, checkpoint)
    before = [{name: tensor.clone() for name, tensor in own.items()} for own in held]
    rounded = [{name: tensor.bfloat16() for name, tensor in own.items()} for own in held]
    with connected(plan, store, next(_generation)) as processes:
        for own in (held, rounded):
            taken, _, _ = update(processes, own)
            check_bits(plan, taken, expected_tensors(plan, checkpoint))
    assert all(torch.equal(own[name], old[name]) for own, old in zip(held, before, strict=True) for name in own)


@pytest.mark.parametrize("case", ["etp inside blocks", "tp to tp"])
def test_digests_of_quantised_tensors_detect_every_bit(store: dist.TCPStore, case: str) -> None:
    plan = fp8_plan(case)
    checkpoint = checkpoint_of(plan)
    expected = expected_tensors(plan, checkpoint)
    with connected(plan, store, next(_generation)) as processes:
        digests = receive_digests(processes, held_by(plan, checkpoint))
    for rank, of_rank in enumerate(digests):
        boxes = plan.shard_map.boxes(rank)
        assert {each.hf_name for each, _ in of_rank} == boxes.keys()
        parts = {name: kept(plan, rank, name, expected) for name in boxes}
        held = {name: expected[name][part].clone() for name, part in parts.items() if part is not None}
        assert compare(of_rank, held.items(), boxes) == Comparison()
        weight = "model.layers.1.self_attn.o_proj.weight"
        for name in (weight, weight + SCALE_SUFFIX):
            changed = held[name].clone()
            bits(changed)[-1, -1] ^= 0x80  # only the sign, if it is a code
            assert compare(of_rank, (held | {name: changed}).items(), boxes) == Comparison({name})


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_quantised_update_with_nan_or_infinity_names_the_tensor(store: dist.TCPStore, value: float) -> None:
    plan = fp8_plan("one rank")
    held = held_by(plan, checkpoint_of(plan))
    held[0]["decoder.layers.1.mlp.linear_fc2.weight"][200, 300] = value
    message = r"model\.layers\.1\.mlp\.down_proj\.weight contains NaN or infinity"
    with connected(plan, store, next(_generation), transfer.SHORT_TIMEOUT_SECONDS) as processes:
        calls = [partial(processes.senders[0].send, held[0]), partial(drain, processes.receivers[0])]
        with pytest.raises(WeightSyncError, match=message):
            transfer.at_once(calls)


def test_quantised_update_without_a_member_of_a_group_names_it(store: dist.TCPStore) -> None:
    plan = fp8_plan("tp inside blocks")
    with connected(plan, store, next(_generation), transfer.SHORT_TIMEOUT_SECONDS) as processes:
        held = held_by(plan, checkpoint_of(plan))
        with pytest.raises(PeerLostError, match="trainer rank 1 on A: "):
            processes.senders[0].send(held[0])


@pytest.mark.parametrize("case", CASES)
def test_quantised_tensors_take_half_the_bytes(case: str) -> None:
    """Codes and scales together, beside bfloat16; alignment of slices in messages is not counted."""
    plan = fp8_plan(case)
    num_bytes = dict.fromkeys((False, True), 0)
    elements = 0
    for messages in plan.incoming(range(len(plan.topology.buffers))).values():
        for message in messages.messages:
            for each in message.slices:
                num_bytes[each.encoding.quantised] += each.num_bytes
                elements += prod(each.shape) if each.encoding.quantised else 0
    assert 0.5 < num_bytes[True] / (2 * elements) <= 0.51
    totals = count(plan._route_map, plan.bucket_bytes)
    per_engine = len(plan.topology.buffers) // plan.engine_layout.num_ranks
    assert int(totals.needed.sum()) * per_engine == int(totals.received.sum()) == sum(num_bytes.values())


@pytest.mark.parametrize("case", CASES)
def test_divided_blocks_exist_only_where_trainers_cut_them(case: str) -> None:
    """Groups of several ranks exist exactly where two ranks hold parts of one block, and members agree on them."""
    plan = fp8_plan(case)
    groups = {rank: plan.divided_blocks(rank) for rank in range(plan.train_layout.world_size)}
    alone = {group.ranks for own in groups.values() for group in own if len(group.ranks) == 1}
    together = {group.ranks for own in groups.values() for group in own if len(group.ranks) > 1}
    # No two ranks hold parts of a block.
    aligned = {"one rank", "tp to tp", "heads on two engine ranks", "ep", "ep to slices", "deepseek_v3 to tp"}
    assert bool(alone | together) == (case not in aligned)
    assert bool(together) == (case not in aligned | {"one rank, small heads", "pp"})
    for ranks in together:
        of_ranks = {rank: next(group for group in groups[rank] if group.ranks == ranks) for rank in ranks}
        listed = of_ranks[ranks[0]]
        for rank, group in of_ranks.items():
            assert [each.hf_name for each in group.tensors] == [each.hf_name for each in listed.tensors]
            assert all((a.mask == b.mask).all() for a, b in zip(group.tensors, listed.tensors, strict=True))
            assert listed.positions[rank].tolist() == group.positions[rank].tolist()
        # Every divided block has parts on some rank, and some on several.
        blocks = sum(int(each.mask.sum()) for each in listed.tensors)
        assert {block for each in listed.positions.values() for block in each.tolist()} == set(range(blocks))
        assert sum(map(len, listed.positions.values())) > blocks


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({"intermediate_size": 640}, TP2, "intermediate_size gives 640 indices, .* tp 2 cuts at 320, inside a block"),
        ({"head_dim": 64}, TP2, "num_key_value_heads gives 128 indices, which the engine's tp 2 cuts at 64"),
    ],
)
def test_shard_map_engine_cut_inside_a_block_is_rejected(
    changes: dict[str, Any], layout: EngineLayout, message: str
) -> None:
    rows = rows_of(DENSE | changes)
    ShardMap(rows, layout)
    ShardMap(rows, EngineLayout(), "fp8")
    with pytest.raises(LayoutError, match=message):
        ShardMap(rows, layout, "fp8")


def test_pieces_bucket_smaller_than_a_row_of_blocks_raises() -> None:
    with pytest.raises(LayoutError, match=r"one block of dim 0 of .*q_proj\.weight.* exceeds 20000 bytes"):
        list(ShardMap(rows_of(DENSE), EngineLayout(), "fp8").pieces(20_000))
