"""Slices of weight syncs, for random layouts of trainer and engine.

Every element of every engine tensor arrives exactly once, with the value of the checkpoint, from the preferred sender,
in buckets of at most the configured size.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.routes import RouteMap
from mcore_rl.weights.slices.senders import RankLocations
from mcore_rl.weights.slices.shard_map import ShardMap
from mcore_rl.weights.slices.totals import count
from model_converters.errors import LayoutError
from model_converters.families import family_for
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement
from model_converters.mapping.separate import trainer_rows
from model_converters.mapping.table import BoundRow, bind
from tests.tiny_models import tiny_fields
from tests.unit.weights.delivery import Sync, Tensors, check_taken, delivered

MODELS: dict[str, dict[str, Any]] = {
    "tied": tiny_fields("qwen2", tie_word_embeddings=True, vocab_size=97),
    "one key-value head": tiny_fields("qwen3", num_attention_heads=8, num_key_value_heads=1),
    "experts": tiny_fields("qwen3_moe", vocab_size=97, num_hidden_layers=5),
    "mixtral": tiny_fields("mixtral"),
    "latent": tiny_fields("deepseek_v3", num_nextn_predict_layers=1),
    "glm": tiny_fields("glm4_moe", num_nextn_predict_layers=1),
    "delta nets": tiny_fields("qwen3_5_moe_text", linear_num_key_heads=4, linear_num_value_heads=8),
    "delta nets by key head": tiny_fields("qwen3_next", linear_num_key_heads=4, linear_num_value_heads=8),
}
SAMPLES = [(seed, list(MODELS)[seed % len(MODELS)]) for seed in range(48)]
MOST_RANKS = 16


def rows_of(config: dict[str, Any]) -> list[BoundRow]:
    return bind(family_for(config).rows(config), config, torch.float32)


def random_checkpoint(rows: list[BoundRow], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    names = {name: shape for bound in rows for name, shape in zip(bound.hf, bound.row.shapes, strict=True)}
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


def random_layouts(chance: random.Random, config: dict[str, Any]) -> tuple[TrainLayout, EngineLayout]:
    has_experts = any("experts" in key for key in config)
    tp, pp, cp = chance.choice((1, 1, 2, 4)), chance.choice((1, 1, 2)), chance.choice((1, 1, 2))
    ep, etp = (chance.choice((1, 2, 4)), chance.choice((1, 1, 2))) if has_experts else (1, 1)
    uneven = {"first_stage_layers": 1} if pp > 1 and chance.random() < 0.5 else {}
    world = int(np.lcm(tp * pp * cp, ep * etp * pp)) * chance.choice((1, 1, 2))
    sharded = pp == 1 and chance.random() < 0.4
    trainer = TrainLayout(world, tp=tp, pp=pp, ep=ep, etp=etp, cp=cp, shard_parameters=sharded, **uneven)
    expert_parallel = has_experts and chance.random() < 0.5
    engine_tp = chance.choice((1, 2, 4))
    dp = chance.choice((1, 1, 2, 3)) if engine_tp == 1 or not expert_parallel else 1
    pp, draft_layers = (
        chance.choice((1, 1, 2, 3)),
        bool(config.get("num_nextn_predict_layers")) and chance.random() < 0.5,
    )
    return trainer, EngineLayout(engine_tp, dp, pp, expert_parallel, draft_layers)


def random_places(chance: random.Random, num_trainers: int, num_engine_ranks: int) -> RankLocations:
    """Choose colocated ranks, or random hosts of which engines and trainers share some."""
    if chance.random() < 0.3:
        devices = [(rank // 2, rank) for rank in range(max(num_trainers, num_engine_ranks))]
        return RankLocations.of(devices[:num_trainers], devices[:num_engine_ranks])
    return RankLocations.of(*([(chance.randrange(4), -1) for _ in range(n)] for n in (num_trainers, num_engine_ranks)))


def sync_of(seed: int, model: str) -> tuple[Sync, Tensors]:
    """Return the first valid pair of layouts, starting at `seed`."""
    config, chance = MODELS[model], random.Random(seed)
    rows = rows_of(config)
    while True:
        try:
            trainer, engine = random_layouts(chance, config)
            Placement(rows, trainer)
            shard_map = ShardMap(rows, engine)
        except LayoutError:
            continue
        if max(trainer.world_size, engine.num_ranks) > MOST_RANKS:
            continue
        locations = random_places(chance, trainer.world_size, engine.num_ranks * chance.choice((1, 2)))
        bucket_bytes = chance.choice((3_000, 20_000, 10**6))
        return Sync(rows, trainer, shard_map, locations, bucket_bytes), random_checkpoint(rows, seed)


@pytest.mark.parametrize(("seed", "model"), SAMPLES)
def test_slices_random_layouts_deliver_every_element_once(seed: int, model: str) -> None:
    sync, checkpoint = sync_of(seed, model)
    check_taken(delivered(sync, checkpoint), checkpoint, MODELS[model], sync.shard_map.layout)


@pytest.mark.parametrize("model", ["tied", "one key-value head", "experts", "mixtral"])
@pytest.mark.parametrize(
    "engine", [EngineLayout(1, 2, 2), EngineLayout(2), EngineLayout(4), EngineLayout(2, expert_parallel=True)], ids=str
)
@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_slices_of_separate_tensors_deliver_every_element_once(ranks: int, engine: EngineLayout, model: str) -> None:
    """The ranks of strategy fsdp2 hold rows of HF tensors and whole experts. Engines with more ranks than key-value
    heads repeat them."""
    config, layout = MODELS[model], TrainLayout(ranks, shard_parameters=True, hf_tensors=True)
    family = rows_of(config)
    rows = bind(trainer_rows(family_for(config).rows(config), layout), config, torch.float32)
    assert [ShardMap(rows, engine).boxes(rank) for rank in range(engine.num_ranks)] == [
        ShardMap(family, engine).boxes(rank) for rank in range(engine.num_ranks)
    ]
    places = random_places(random.Random(ranks), ranks, engine.num_ranks)
    sync, checkpoint = Sync(rows, layout, ShardMap(rows, engine), places, 3_000), random_checkpoint(family, 0)
    check_taken(delivered(sync, checkpoint), checkpoint, config, engine)


@pytest.mark.parametrize(("seed", "model"), SAMPLES[:12])
def test_totals_match_messages_from_preferred_senders(seed: int, model: str) -> None:
    sync, _ = sync_of(seed, model)
    check_preferred_senders(sync)
    totals = count(sync.route_map, sync.bucket_bytes)
    received = [[each for message in sync.received_by(rank) for each in message.slices]
                for rank in range(sync.num_engine_ranks)]  # fmt: skip
    assert totals.received.tolist() == [sum(each.num_bytes for each in slices) for slices in received]
    needed = totals.needed.tolist() * (sync.num_engine_ranks // sync.shard_map.layout.num_ranks)
    assert totals.received.tolist() == needed
    in_bucket: Counter[tuple[int, int]] = Counter()
    away = crossing = 0
    for rank in range(sync.num_engine_ranks):
        for message in sync.received_by(rank):
            num_bytes = sum(each.num_bytes for each in message.slices)
            in_bucket[rank, message.bucket] += num_bytes
            sender, locations = message.sender, sync.locations
            same = locations.trainer_devices[sender] == locations.engine_devices[rank] >= 0
            away += 0 if same else num_bytes
            crossing += num_bytes if locations.trainer_hosts[sender] != locations.engine_hosts[rank] else 0
    assert max(in_bucket.values()) <= sync.bucket_bytes
    assert {bucket for _, bucket in in_bucket} == set(range(totals.buckets))
    assert int(totals.sent.sum()) == away
    assert int(totals.sent_across.sum()) == int(totals.received_across.sum()) == crossing


def check_preferred_senders(sync: Sync) -> None:
    """Check that each sender is on the receiver's device or else host, if a rank with the tensor is there."""
    locations, placement = sync.locations, sync.route_map.placement
    holders: dict[str, list[range]] = {}
    for bound in sync.shard_map.rows:
        for holding in placement.holdings(bound):
            holders.setdefault(bound.mcore, []).append(holding.ranks)
    for rank in range(sync.num_engine_ranks):
        for message in sync.received_by(rank):
            for each in message.slices:
                (ranks,) = [ranks for ranks in holders[each.mcore_name] if message.sender in ranks]
                device, host = locations.engine_devices[rank], locations.engine_hosts[rank]
                if device >= 0 and device in locations.trainer_devices[ranks]:
                    assert locations.trainer_devices[message.sender] == device
                elif host in locations.trainer_hosts[ranks]:
                    assert locations.trainer_hosts[message.sender] == host


def test_router_holders_on_one_host_prefers_same_device() -> None:
    rows = rows_of(MODELS["tied"])
    locations = RankLocations.of([(0, device) for device in range(4)], [(0, device) for device in reversed(range(4))])
    sync = Sync(rows, TrainLayout(4), ShardMap(rows, EngineLayout()), locations, 10**6)
    for rank in range(4):
        assert {message.sender for message in sync.received_by(rank)} == {3 - rank}


def test_router_remote_engines_balances_holders() -> None:
    """Eight holders of all tensors and three engines on another host: no holder exceeds the mean by two tensors."""
    rows = rows_of(MODELS["latent"])
    locations = RankLocations.of([(0, -1)] * 8, [(1, -1)] * 3)
    totals = count(RouteMap(Placement(rows, TrainLayout(8)), ShardMap(rows, EngineLayout()), locations), 10**6)
    largest = max(4 * int(np.prod(shape)) for bound in rows for shape in bound.row.shapes)
    assert int(totals.sent.max()) <= totals.sent.mean() + 2 * largest  # gate and up are one row
    assert int(totals.sent.sum()) == 3 * int(totals.needed[0])


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ("experts", {"tp": 3}, r"num_attention_heads.* 4|num_key_value_heads.*the engine's tp 3"),
        ("experts", {"dp": 9, "expert_parallel": True}, "8 experts are fewer than the engine's 9 ranks"),
        ("mixtral", {"pp": 5}, "4 layers are fewer than the engine's pp 5"),
        ("tied", {"tp": 0}, "the engine's tp is 0"),
    ],
)
def test_shard_map_invalid_engine_layout_names_the_size(model: str, layout: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ShardMap(rows_of(MODELS[model]), EngineLayout(**layout))


@pytest.mark.parametrize("model", ["latent", "glm"])
def test_shard_map_with_draft_layers_sends_their_projection_whole(model: str) -> None:
    rows, tp = rows_of(MODELS[model]), EngineLayout(tp=2, draft_layers=True)
    last = MODELS[model]["num_hidden_layers"]
    names = {name for name in ShardMap(rows, tp).boxes(1) if name.startswith(f"model.layers.{last}.")}
    assert ShardMap(rows, tp).boxes(1)[f"model.layers.{last}.eh_proj.weight"] == (((0, 0), (32, 64)),)
    assert f"model.layers.{last}.mlp.experts.7.up_proj.weight" in names
    assert not names & {f"model.layers.{last}.embed_tokens.weight", f"model.layers.{last}.shared_head.head.weight"}
    assert names.isdisjoint(ShardMap(rows, EngineLayout(tp=2)).boxes(1))


def test_pieces_bucket_smaller_than_one_index_raises() -> None:
    rows = rows_of(MODELS["tied"])
    with pytest.raises(LayoutError, match=r"one index of dim 0 of model\.embed_tokens\.weight exceeds 64 bytes"):
        list(ShardMap(rows, EngineLayout()).pieces(64))
