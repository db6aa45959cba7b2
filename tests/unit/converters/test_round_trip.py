"""HF tensors -> every rank's Megatron tensors -> HF tensors, over a grid of layouts, bit for bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from safetensors.torch import load_file

from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint, HFWriter
from model_converters.hf.loader import load_tensors
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import export_pieces, export_plan, local_shapes
from tests.plans import assert_tiled
from tests.unit.converters.hf_models import bound_rows, write_hf


def grid():
    """Yield all combinations of tp, pp, ep, etp with 1, 2 or 3 times the minimum ranks, and some irregular layouts."""
    for number, (tp, pp, ep, etp) in enumerate(itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 8), (1, 2))):
        yield {"world_size": pp * math.lcm(tp, ep * etp) * (1 + number % 3), "tp": tp, "pp": pp, "ep": ep, "etp": etp}
    yield {"world_size": 4, "pp": 2, "vpp": 2, "ep": 2}
    yield {"world_size": 4, "tp": 2, "pp": 2, "vpp": 2}
    yield {"world_size": 4, "pp": 2, "first_stage_layers": 1, "ep": 2}
    yield {"world_size": 3, "pp": 3, "first_stage_layers": 1, "last_stage_layers": 1}
    yield {"world_size": 6, "tp": 2, "pp": 3, "last_stage_layers": 2}
    yield {"world_size": 8, "tp": 2, "pp": 2, "cp": 2, "ep": 4}


def assert_same(found, wanted):
    assert set(found) == set(wanted)
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not different


SPARSE = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")
DENSE = ("qwen3", "qwen2", "llama", "deepseek_v2", "kimi_k2")


def cases():
    """Yield (family, sizes): all layouts for families with experts, layouts with ep = etp = 1 for the others.

    One family per layout always runs, each family in turn; the other combinations run on demand.
    """
    for number, sizes in enumerate(grid()):
        families = SPARSE + DENSE if sizes.get("ep", 1) == sizes.get("etp", 1) == 1 else SPARSE
        for family in families:
            marks = [] if family == families[number % len(families)] else [pytest.mark.on_demand]
            yield pytest.param(family, sizes, marks=marks)


def case_name(value):
    return value if isinstance(value, str) else "-".join(f"{key}{size}" for key, size in value.items())


@pytest.mark.parametrize(("family", "sizes"), cases(), ids=case_name)
def test_round_trip_over_all_ranks_restores_hf_tensors(family, sizes, family_configs, random_hf, local_mcore, tmp_path):
    layout = TrainLayout(**sizes)
    config = family_configs[family]
    hf = random_hf(config)
    bound = bound_rows(config)
    plans = export_plan(bound, layout)
    check_complete(bound, hf.keys())
    assert_tiled(bound, plans)
    rebuilt = {name: torch.full_like(tensor, torch.nan) for name, tensor in hf.items()}
    with HFCheckpoint(write_hf(tmp_path / "hf", config, hf)) as checkpoint:
        for rank in range(layout.world_size):
            shapes = local_shapes(bound, layout, rank)
            local = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
            load_tensors(checkpoint, bound, layout, rank, local)
            assert_same(local, local_mcore(hf, config, layout, rank))
            for plan, piece, view in export_pieces(plans, local, rank):
                target = rebuilt[plan.hf_name].narrow(piece.dim, piece.start, piece.length)
                assert torch.isnan(target).all(), f"{plan.hf_name} is written twice"
                target.copy_(view)
    assert_same(rebuilt, hf)


@pytest.mark.parametrize("pp", [1, 2])
def test_round_trip_tied_embeddings_load_twice_export_once(pp, dense_config, random_hf, local_mcore, tmp_path):
    config = dense_config | {"tie_word_embeddings": True}
    layout = TrainLayout(2 * pp, tp=2, pp=pp)
    hf = random_hf(config)
    bound = bound_rows(config)
    plans = export_plan(bound, layout)
    assert sorted(plan.hf_name for plan in plans) == sorted(hf)
    with HFCheckpoint(write_hf(tmp_path / "hf", config, hf)) as checkpoint:
        for rank in range(layout.world_size):
            wanted = local_mcore(hf, config, layout, rank)
            local = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
            load_tensors(checkpoint, bound, layout, rank, local)
            assert_same(local, wanted)


def test_load_tensors_differing_tied_copy_is_rejected(dense_config, random_hf, tmp_path):
    config = dense_config | {"tie_word_embeddings": True}
    bound, layout = bound_rows(config), TrainLayout(1)
    local = {name: torch.zeros(shape) for name, shape in local_shapes(bound, layout, 0).items()}
    hf = random_hf(config)
    hf["lm_head.weight"] = hf["model.embed_tokens.weight"].clone()
    with HFCheckpoint(write_hf(tmp_path / "equal", config, hf)) as checkpoint:
        load_tensors(checkpoint, bound, layout, 0, local)
    hf["lm_head.weight"][3, 5] += 1
    with (
        HFCheckpoint(write_hf(tmp_path / "other", config, hf)) as checkpoint,
        pytest.raises(ConversionError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"),
    ):
        load_tensors(checkpoint, bound, layout, 0, local)


def test_load_tensors_converts_dtype_and_strides(moe_config, random_hf, local_mcore, tmp_path):
    hf = {name: tensor.bfloat16() for name, tensor in random_hf(moe_config).items()}
    layout = TrainLayout(4, tp=2, ep=2)
    bound = bound_rows(moe_config, torch.bfloat16)
    with HFCheckpoint(write_hf(tmp_path / "hf", moe_config, hf)) as checkpoint:
        for dtype in (torch.bfloat16, torch.float32):
            wanted = {name: t.to(dtype) for name, t in local_mcore(hf, moe_config, layout, 3).items()}
            # Allocate twice the width and slice, so that no target is contiguous.
            local = {name: torch.zeros(*t.shape, 2, dtype=dtype)[..., 0] for name, t in wanted.items()}
            load_tensors(checkpoint, bound, layout, 3, local)
            assert_same(local, wanted)


@pytest.mark.parametrize("max_shard_bytes", [1, 3000, 10**9])
def test_writer_several_ranks_write_readable_directory(max_shard_bytes, moe_config, random_hf, local_mcore, tmp_path):
    hf = random_hf(moe_config)
    layout = TrainLayout(8, tp=2, pp=2, ep=2, etp=2)
    plans = export_plan(bound_rows(moe_config), layout)
    source = write_hf(tmp_path / "hf", moe_config, hf)
    owner = HFWriter(tmp_path / "out", max_shard_bytes)
    owner.begin(plans)
    for rank in range(layout.world_size):
        writer = owner if rank == 0 else HFWriter(tmp_path / "out", max_shard_bytes)
        if rank:
            writer.attach(plans)
        for plan, piece, view in export_pieces(plans, local_mcore(hf, moe_config, layout, rank), rank):
            writer.write(plan, piece, view)
        if rank:
            writer.close()
    owner.finish(source)
    found = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    assert_same(found, hf)
    with HFCheckpoint(tmp_path / "out") as checkpoint:
        assert_same({name: checkpoint.read(name) for name in checkpoint.shapes}, hf)


def test_export_pieces_are_views(moe_config, random_hf, local_mcore):
    layout = TrainLayout(2, tp=2, etp=2)
    plans = export_plan(bound_rows(moe_config), layout)
    local = local_mcore(random_hf(moe_config), moe_config, layout, 1)
    storages = {tensor.untyped_storage().data_ptr() for tensor in local.values()}
    pieces = list(export_pieces(plans, local, 1))
    assert pieces
    assert all(view.untyped_storage().data_ptr() in storages for _, _, view in pieces)
