"""Frozen weights: the rows of each kind of run, and updates without them, whose bytes are the least possible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mcore_rl.config.models import ActorConfig, LoraConfig
from mcore_rl.errors import WeightSyncError
from mcore_rl.remote.shared_folder import SharedFolder
from mcore_rl.weights.frozen import ALL_TRAINED, TrainedWeights, frozen_rows
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.files.run_files import RunFiles
from mcore_rl.weights.transports.files.writer import KEPT_TRANSFERS, TransferWriter
from mcore_rl.weights.transports.link import MessageKind, MessageTag
from mcore_rl.weights.verify import compare
from model_converters.families import family_for
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.separate import trainer_rows
from tests.tiny_models import tiny_fields
from tests.unit.weights import test_quantised_sync as quantised
from tests.unit.weights import transfer
from tests.unit.weights.delivery import check_taken
from tests.unit.weights.test_files import until_fetched
from tests.unit.weights.test_transfer import CASES, checkpoint_of, drain, held_by
from tests.unit.weights.transfer import Processes, connected, receive_digests, sync_plan, update

LORA = TrainedWeights(adapters=())
TOWER = TrainedWeights(vision=False)


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return transfer.store()


_generation = iter(range(10**6))


def names_of(family: str, trained: TrainedWeights, layout: TrainLayout | None = None) -> tuple[set[str], set[str]]:
    """Return the HF names of frozen and of trained tensors, with placeholders and without the model's prefix."""
    layout = layout or TrainLayout(1)
    config = tiny_fields(family)
    frozen = frozen_rows(config, layout, trained)
    of_frozen, of_trained = set[str](), set[str]()
    for row in trainer_rows(family_for(config).rows(config), layout):
        (of_frozen if (row.mcore, row.layers) in frozen else of_trained).update(row.hf)
    return tuple({name.removeprefix("model.").removeprefix("language_model.layers.{l}.").removeprefix("layers.{l}.")
                  for name in names} for names in (of_frozen, of_trained))  # type: ignore[return-value]  # fmt: skip


def leaves(names: set[str], *wanted: str) -> set[str]:
    return {name for name in names if any(each in name for each in wanted)}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_vision_tower_is_the_only_frozen_part(family: str) -> None:
    frozen, trained = names_of(family, TOWER)
    assert frozen
    assert all(name.startswith("visual.") for name in frozen)
    assert not leaves(trained, "visual.")
    assert names_of(family, ALL_TRAINED)[0] == set()


def test_adapters_freeze_all_weights_of_modules_without_one() -> None:
    frozen, trained = names_of("qwen3_moe", LORA)
    assert leaves(frozen, "experts", "mlp.gate.", "norm", "embed", "lm_head") == frozen
    assert leaves(trained, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj") == trained


def test_adapters_keep_the_bias_of_a_trained_module_with_its_weight() -> None:
    _, trained = names_of("qwen2", LORA)
    assert {f"self_attn.{module}_proj.bias" for module in "qkv"} <= trained


def test_adapters_send_modules_that_engines_fuse_together() -> None:
    frozen, trained = names_of("deepseek_v3", TrainedWeights(adapters=("q_a_proj",)))
    assert trained == {"self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"}
    assert "self_attn.kv_b_proj.weight" in frozen
    separate = TrainLayout(1, shard_parameters=True, hf_tensors=True)
    frozen, trained = names_of("qwen2", TrainedWeights(adapters=("v_proj", "up_proj")), separate)
    assert trained == {f"self_attn.{each}_proj.{kind}" for each in "qkv" for kind in ("weight", "bias")} | {
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
    }
    assert "self_attn.o_proj.weight" in frozen


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2"])
def test_full_training_freezes_nothing_also_no_correction_bias(family: str) -> None:
    assert names_of(family, TrainedWeights.of(ActorConfig()))[0] == set()


def test_indexers_are_frozen_without_adapters_too() -> None:
    frozen, _ = names_of("deepseek_v32", ALL_TRAINED)
    assert frozen
    assert leaves(frozen, "indexer") == frozen


def test_trained_weights_follow_the_keys_of_actor() -> None:
    assert TrainedWeights.of(ActorConfig()) == TOWER
    assert TrainedWeights.of(ActorConfig(train_vision=True)) == ALL_TRAINED
    lora = LoraConfig(rank=4, target_modules=["q_proj"])
    assert TrainedWeights.of(ActorConfig(lora=lora)) == TrainedWeights(vision=False, adapters=("q_proj",))


def lora_plan(case: str, **settings: Any) -> SyncPlan:
    return replace(sync_plan(*CASES[case], **settings), trained=LORA)


def slice_bytes(plan: SyncPlan, *, frozen: bool) -> list[int]:
    """Return the least bytes that each engine rank needs of frozen or of other tensors."""
    found = []
    for rank in range(plan.engine_layout.num_ranks):
        boxes = plan.shard_map.boxes(rank)
        wanted = {name: parts for name, parts in boxes.items() if (name in plan.frozen_names) == frozen}
        found.append(sum(4 * int(np.prod(size)) for parts in wanted.values() for _, size in parts))
    return found * (len(plan.topology.engines) // plan.engine_layout.num_ranks)


def check_later_update(processes: Processes, seed: int) -> list[int]:
    """Run an update without frozen weights. Engines must receive the others, every element once. Returns the bytes
    that each engine rank received."""
    plan = processes.plan
    checkpoint = checkpoint_of(plan, seed)
    taken, received, sent = update(processes, held_by(plan, checkpoint), plan.first_trained_round)
    trained = {name: value for name, value in checkpoint.items() if name not in plan.frozen_names}
    assert all(not plan.frozen_names & boxes.keys() for boxes in taken)
    check_taken(taken, trained, plan.hf_config, plan.engine_layout)
    by_buffer = np.sum(sent, axis=0)
    assert received == [by_buffer[plan.topology.buffer_of(rank)] for rank in range(len(received))]
    return received


@pytest.mark.parametrize(("num_slots", "bucket_bytes"), [(1, 20_000), (3, 52_000)])
@pytest.mark.parametrize("case", CASES)
def test_versions_one_and_two_have_the_least_bytes(
    store: dist.TCPStore, case: str, num_slots: int, bucket_bytes: int
) -> None:
    plan = lora_plan(case, num_slots=num_slots, bucket_bytes=bucket_bytes)
    assert 0 < plan.first_trained_round < plan.num_rounds
    padding = 0.02  # alignment of slices
    with connected(plan, store, next(_generation)) as processes:
        checkpoint = checkpoint_of(plan, 1)
        taken, whole, _ = update(processes, held_by(plan, checkpoint))
        check_taken(taken, checkpoint, plan.hf_config, plan.engine_layout)
        least = [
            sum(pair) for pair in zip(slice_bytes(plan, frozen=True), slice_bytes(plan, frozen=False), strict=True)
        ]
        assert whole == pytest.approx(least, rel=padding)
        for seed in (2, 3):
            assert check_later_update(processes, seed) == pytest.approx(slice_bytes(plan, frozen=False), rel=padding)


def test_engines_that_discarded_weights_receive_all_again(store: dist.TCPStore) -> None:
    plan = lora_plan("all kinds")
    with connected(plan, store, next(_generation)) as processes:
        update(processes, held_by(plan, checkpoint_of(plan, 1)))
        check_later_update(processes, 2)
        checkpoint = checkpoint_of(plan, 3)
        taken, _, _ = update(processes, held_by(plan, checkpoint))
        check_taken(taken, checkpoint, plan.hf_config, plan.engine_layout)


def test_deltas_of_trained_weights_keep_no_copies_of_frozen_ones(store: dist.TCPStore) -> None:
    plan = lora_plan("all kinds", delta=True)
    with connected(plan, store, next(_generation)) as processes:

        def copied() -> set[int]:
            relays = [relay._copies._copies for sender in processes.senders for relay in sender._relays]
            held = [getattr(each._messages, "_copies")._copies for each in processes.receivers  # noqa: B009
                    if hasattr(each._messages, "_copies")]  # fmt: skip
            sent = [sender._copies._copies for sender in processes.senders]
            return {bucket for copies in (*relays, *held, *sent) for bucket, _, _ in copies}

        checkpoint = checkpoint_of(plan, 1)
        update(processes, held_by(plan, checkpoint))
        first = sum(sender.delta_bytes.content for sender in processes.senders)
        assert min(copied()) == 0
        update(processes, held_by(plan, checkpoint), plan.first_trained_round)
        assert min(copied()) == plan.first_trained_round
        later = sum(sender.delta_bytes.content for sender in processes.senders)
        assert later < 0.5 * first
        assert sum(sender.delta_bytes.sent for sender in processes.senders) < 0.05 * later
        check_later_update(processes, 2)
        taken, _, _ = update(processes, held_by(plan, checkpoint))
        check_taken(taken, checkpoint, plan.hf_config, plan.engine_layout)


@pytest.mark.parametrize("delta", [False, True])
def test_files_of_later_versions_lack_frozen_weights(store: dist.TCPStore, tmp_path: Path, delta: bool) -> None:
    plan = lora_plan("all kinds", transport="files", delta=delta)
    folder = RunFiles(f"{tmp_path}/run").begin_connection(1)

    def num_bytes() -> int:
        return sum(each.stat().st_size for each in Path(folder).rglob("*.weights.*"))

    with connected(plan, store, next(_generation), folder=folder) as processes:
        update(processes, held_by(plan, checkpoint_of(plan, 1)))
        first = num_bytes()
        for seed in (2, 3, 4):
            for receiver in processes.receivers:
                receiver.fetch(plan.first_trained_round)
            check_later_update(processes, seed)
        assert num_bytes() < 0.8 * first  # files of two versions
        processes.receivers[0].fetch(plan.first_trained_round)
        with pytest.raises(WeightSyncError, match=rf"from round {plan.first_trained_round} on was fetched, not from 0"):
            drain(processes.receivers[0])


def test_digests_cover_frozen_weights_after_later_updates(store: dist.TCPStore) -> None:
    plan = lora_plan("an engine on each host")
    with connected(plan, store, next(_generation)) as processes:
        held = held_by(plan, checkpoint := checkpoint_of(plan, 1))
        update(processes, held)
        update(processes, held, plan.first_trained_round)
        for of_rank in receive_digests(processes, held):
            whole = {name: value for name, value in checkpoint.items() if "rotary" not in name}
            boxes = {name: (((0,) * value.dim(), tuple(value.shape)),) for name, value in whole.items()}
            name = "model.layers.1.mlp.experts.3.up_proj.weight"
            assert name in plan.frozen_names
            found = compare(of_rank, (whole | {name: whole[name] + 1}).items(), boxes)
            assert (found.differing, found.missing) == ({name}, set())


def test_plan_staggers_frozen_and_trained_rounds_apart() -> None:
    """Engines on other hosts start with different buckets, but none of an update without frozen weights is frozen."""
    plan = lora_plan("an engine on each host")
    assert plan._staggers
    for number, incoming in plan.incoming(range(len(plan.topology.buffers))).items():
        buckets = {sync_round: placed[0].message.bucket for sync_round, placed in incoming.rounds.items()}
        frozen = {sync_round for sync_round, bucket in buckets.items() if bucket < plan.first_trained_round}
        assert frozen <= set(range(plan.first_trained_round)), number
        assert len(buckets) == len(set(buckets.values()))


def test_routes_of_later_updates_are_balanced_by_their_own_bytes() -> None:
    """The frozen embedding is one slice, of one rank. It must not count when other weights are divided."""
    fields = tiny_fields("qwen3", vocab_size=997, tie_word_embeddings=True)
    plan = sync_plan(fields, TrainLayout(2), EngineLayout(), "AA", "B", bucket_bytes=1 << 20)
    plan = replace(plan, trained=LORA)
    sent = [
        sum(m.num_bytes for at, ms in plan.outgoing(rank).items() if at >= plan.first_trained_round for m in ms)
        for rank in range(2)
    ]
    assert max(sent) < 1.2 * min(sent)


def test_files_of_later_versions_need_no_rank_with_frozen_weights_only(store: dist.TCPStore, tmp_path: Path) -> None:
    """Four projections are trained, so some of six ranks send nothing after the first update."""
    fields = tiny_fields("qwen3")
    plan = sync_plan(fields, TrainLayout(6), EngineLayout(), "AAAAAA", "B", bucket_bytes=1 << 20, transport="files")
    plan = replace(plan, trained=TrainedWeights(adapters=("o_proj",)))
    senders = [rank for rank in range(6) if max(plan.outgoing(rank), default=0) >= plan.first_trained_round]
    assert len(senders) < 6
    folder = RunFiles(f"{tmp_path}/run").begin_connection(1)
    with connected(plan, store, next(_generation), transfer.SHORT_TIMEOUT_SECONDS, folder) as processes:
        held, first_round = held_by(plan, checkpoint_of(plan, 1)), plan.first_trained_round
        update(processes, held)
        for sender, tensors in zip(processes.senders, held, strict=True):
            sender.send(tensors, first_round=first_round)
        processes.receivers[0].fetch(first_round)
        until_fetched(processes.receivers[0])


@pytest.mark.parametrize("case", ["etp inside blocks", "ep and etp", "shared experts"])
def test_quantised_updates_combine_maxima_of_trained_blocks_only(store: dist.TCPStore, case: str) -> None:
    """Blocks of frozen and of trained tensors are divided over trainer ranks; scales need the maxima of all parts."""
    plan = replace(quantised.fp8_plan(case), trained=LORA)
    frozen = {tensor.hf_name for group in plan.divided_blocks(0, frozen=True) for tensor in group.tensors}
    assert frozen
    assert frozen <= plan.frozen_names
    with connected(plan, store, next(_generation)) as processes:
        first = quantised.checkpoint_of(plan, 1)
        taken, _, _ = update(processes, quantised.held_by(plan, first))
        quantised.check_bits(plan, taken, quantised.expected_tensors(plan, first))
        second = quantised.checkpoint_of(plan, 2)
        taken, _, _ = update(processes, quantised.held_by(plan, second), plan.first_trained_round)
        expected = quantised.expected_tensors(plan, second)
        for of_rank in taken:
            assert of_rank.keys() == {box.hf_name for box in plan.shard_map.tensors()} - plan.frozen_names
            for name, boxes in of_rank.items():
                assert all(torch.equal(quantised.bits(box), quantised.bits(_box(expected[name], start, box)))
                           for start, box in boxes), name  # fmt: skip


def _box(whole: torch.Tensor, start: tuple[int, ...], box: torch.Tensor) -> torch.Tensor:
    return whole[tuple(slice(first, first + length) for first, length in zip(start, box.shape, strict=True))]


def test_files_of_a_rank_with_frozen_weights_only_are_removed_later(tmp_path: Path) -> None:
    folder = SharedFolder("weights.directory", f"file://{tmp_path}")
    writer = TransferWriter(folder, 0, timeout_seconds=9.0)
    writer.put(torch.zeros(8, dtype=torch.uint8), MessageTag(MessageKind.WEIGHTS, 0, 0))
    for _ in range(KEPT_TRANSFERS + 1):
        writer.finish()
    writer.close()
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []
