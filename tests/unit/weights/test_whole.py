"""Whole tensors of trainer ranks: in any layout those that share one give what the checkpoint has, and somebody gives
each."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.shard_map import ShardMap
from mcore_rl.weights.whole import WholeTensors
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.table import BoundRow
from tests.unit.weights.delivery import Sync, Tensors, trainer_tensors
from tests.unit.weights.test_slices import MODELS, random_checkpoint, random_layouts, rows_of

Gather = Callable[[torch.Tensor, bool], list[torch.Tensor]]


def layout_of(model: str, seed: int) -> tuple[TrainLayout, list[BoundRow]]:
    """The first layout from `seed` on that the model can have."""
    rows, chance = rows_of(MODELS[model]), random.Random(seed)
    while True:
        try:
            layout, _ = random_layouts(chance, MODELS[model])
            WholeTensors(rows, layout, 0, _gather_nothing)
            trainer_tensors(sync_of(rows, layout), 0, random_checkpoint(rows, 0))
            return layout, rows
        except ValueError:
            continue


def sync_of(rows: list[BoundRow], layout: TrainLayout) -> Sync:
    return Sync(rows, layout, None, None, 0)  # type: ignore[arg-type]


def _gather_nothing(tensor: torch.Tensor, expert: bool) -> list[torch.Tensor]:
    raise AssertionError("nothing is divided here")


def gather_among(ranks: list[Tensors], layout: TrainLayout, rank: int) -> Gather:
    """The shards, of which this rank's is known by its place in memory."""
    name_of = {tensor.data_ptr(): name for name, tensor in ranks[rank].items()}
    at = layout.coordinates(rank)

    def gather(tensor: torch.Tensor, expert: bool) -> list[torch.Tensor]:
        first, size = (rank - at.etp, layout.etp) if expert else (rank - at.tp, layout.tp)
        return [ranks[peer][name_of[tensor.data_ptr()]] for peer in range(first, first + size)]

    return gather


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_is_given_as_the_checkpoint_has_it(model: str, seed: int) -> None:
    layout, rows = layout_of(model, seed)
    checkpoint = random_checkpoint(rows, seed)
    ranks = [trainer_tensors(sync_of(rows, layout), rank, checkpoint) for rank in range(layout.world_size)]
    wanted = ShardMap(rows, EngineLayout()).rows
    given: set[str] = set()
    for rank, tensors in enumerate(ranks):
        whole = WholeTensors(wanted, layout, rank, gather_among(ranks, layout, rank))
        specs = {name: (dtype, shape) for name, dtype, shape in whole.specs}
        assert specs.keys() == {name for bound in wanted for name in bound.hf}
        for name in [name for name in specs if name in whole.held]:
            tensor = whole.of(name, tensors)
            assert (tensor.dtype, tuple(tensor.shape)) == specs[name]
            assert torch.equal(tensor, checkpoint[name]), name
        given |= whole.held
    assert given == {name for bound in wanted for name in bound.hf}


def test_what_is_whole_already_is_not_copied_and_what_is_joined_is_joined_once() -> None:
    rows = rows_of(MODELS["experts"])
    checkpoint = random_checkpoint(rows, 0)
    one = TrainLayout(1)
    (tensors,) = ranks = [trainer_tensors(sync_of(rows, one), 0, checkpoint)]
    whole = WholeTensors(rows, one, 0, gather_among(ranks, one, 0))
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    experts = [name for name in whole.held if ".experts." in name]
    assert all(whole.of(name, tensors).untyped_storage().data_ptr() in memory for name in experts)

    two = TrainLayout(2, tp=2)
    ranks = [trainer_tensors(sync_of(rows, two), rank, checkpoint) for rank in range(2)]
    asked: list[bool] = []
    among = gather_among(ranks, two, 0)
    whole = WholeTensors(rows, two, 0, lambda tensor, expert: asked.append(expert) or among(tensor, expert))
    projections = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    for name in projections:
        whole.of(name, ranks[0])
    assert asked == [False]
    whole.forget()  # an update of the weights
    ranks[0] = {name: tensor + 1 for name, tensor in ranks[0].items()}
    with pytest.raises(KeyError):  # asked anew, of tensors that the others' shards are not known by
        whole.of(projections[0], ranks[0])


def test_a_tensor_that_is_not_there_is_named() -> None:
    rows = rows_of(MODELS["experts"])
    whole = WholeTensors(rows, TrainLayout(1), 0, _gather_nothing)
    with pytest.raises(
        WeightSyncError, match=r"has no embedding\.word_embeddings\.weight, .* model\.embed_tokens\.weight"
    ):
        whole.of("model.embed_tokens.weight", {})
