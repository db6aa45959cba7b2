"""HF tensors -> every rank's Megatron tensors -> HF tensors, over a grid of layouts, bit for bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint, HFWriter
from model_converters.hf.loader import load_tensors
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import export_pieces, export_plan
from model_converters.mapping.table import is_parameter
from tests.plans import assert_tiled
from tests.selection import on_demand_unless
from tests.unit.converters.hf_models import assert_same, bound_rows, load_rank, stored, write_hf


def grid():
    """Yield (sizes, usual) of all combinations of tp, pp, ep, etp with 1, 2 or 3 times the minimum ranks, and others.

    The usual ones, which always run, contain every pair of values of two sizes.
    """
    for number, (tp, pp, ep, etp) in enumerate(itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 8), (1, 2))):
        least = pp * math.lcm(tp, ep * etp)
        world_size = least * (1 + number % 3) if least <= 16 else least
        usual = (number // 18 + number // 6 + number // 2) % 3 == 0
        yield {"world_size": world_size, "tp": tp, "pp": pp, "ep": ep, "etp": etp}, usual
    yield {"world_size": 4, "pp": 2, "vpp": 2, "ep": 2}, True
    yield {"world_size": 4, "tp": 2, "pp": 2, "vpp": 2}, True
    yield {"world_size": 4, "pp": 2, "first_stage_layers": 1, "ep": 2}, True
    yield {"world_size": 3, "pp": 3, "first_stage_layers": 1, "last_stage_layers": 1}, True
    yield {"world_size": 6, "tp": 2, "pp": 3, "last_stage_layers": 2}, True
    yield {"world_size": 8, "tp": 2, "pp": 2, "cp": 2, "ep": 4}, True


SPARSE = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe", "qwen3_next"),
    "qwen3_5_moe_text",
)
ALL = ("llama", "deepseek_v2", "kimi_k2", "qwen2", "qwen3", "qwen3_5_text", *SPARSE)


def cases():
    """Yield (family, sizes): all layouts for families with experts, layouts with ep = etp = 1 for the others.

    One family per usual layout always runs, each family in turn; the other combinations run on demand.
    """
    turns = {SPARSE: itertools.cycle(SPARSE), ALL: itertools.cycle(ALL)}
    for sizes, usual in grid():
        families = ALL if sizes.get("ep", 1) == sizes.get("etp", 1) == 1 else SPARSE
        chosen = next(turns[families]) if usual else None
        for family in families:
            yield pytest.param(family, sizes, marks=on_demand_unless(family == chosen))


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
            local = load_rank(checkpoint, layout, rank, bound)
            assert_same(local, local_mcore(hf, config, layout, rank))
            for plan, piece, view in export_pieces(plans, local, rank):
                target = rebuilt[plan.hf_name].narrow(piece.dim, piece.start, piece.length)
                assert torch.isnan(target).all(), f"{plan.hf_name} is written twice"
                target.copy_(view)
    assert_same(rebuilt, hf)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen2", {"world_size": 3}),
        ("deepseek_v3", {"world_size": 8, "tp": 2, "ep": 2}),
        ("qwen3_moe", {"world_size": 8, "tp": 2, "cp": 2, "ep": 2, "etp": 2}),
    ],
    ids=case_name,
)
def test_load_tensors_of_sharded_layout_reads_rows(family, sizes, family_configs, random_hf, local_mcore, tmp_path):
    layout, config = TrainLayout(**sizes, shard_parameters=True), family_configs[family]
    hf, bound = random_hf(config), bound_rows(config)
    rows = {row.mcore: row for row in bound}
    with HFCheckpoint(write_hf(tmp_path / "hf", config, hf)) as checkpoint:
        for rank in range(layout.world_size):
            whole = local_mcore(hf, config, layout, rank)
            assert_same(
                load_rank(checkpoint, layout, rank, bound),
                {name: _rows_of(tensor, rows[name], layout, rank) for name, tensor in whole.items()},
            )


def _rows_of(tensor, row, layout, rank):
    """Return the rows of a rank by torch.chunk. Ranks that differ only in dp and cp, or in edp, divide a tensor."""
    if not is_parameter(row):
        return tensor
    at = layout.coordinates(rank)
    index, count = at.dp * layout.cp + at.cp, layout.dp * layout.cp
    if row.expert is not None:
        index, count = at.edp, layout.edp
    parts = tensor.chunk(count)
    return parts[index] if index < len(parts) else tensor[:0]


@pytest.mark.parametrize("pp", [1, 2])
def test_round_trip_tied_embeddings_load_twice_export_once(pp, dense_config, random_hf, local_mcore, tmp_path):
    config = dense_config | {"tie_word_embeddings": True}
    layout = TrainLayout(2 * pp, tp=2, pp=pp)
    hf = random_hf(config)
    plans = export_plan(bound_rows(config), layout)
    assert sorted(plan.hf_name for plan in plans) == sorted(hf)
    with HFCheckpoint(write_hf(tmp_path / "hf", config, hf)) as checkpoint:
        for rank in range(layout.world_size):
            assert_same(load_rank(checkpoint, layout, rank), local_mcore(hf, config, layout, rank))


def test_load_tensors_differing_tied_copy_is_rejected(dense_config, random_hf, tmp_path):
    config = dense_config | {"tie_word_embeddings": True}
    hf = random_hf(config)
    hf["lm_head.weight"] = hf["model.embed_tokens.weight"].clone()
    with HFCheckpoint(write_hf(tmp_path / "equal", config, hf)) as checkpoint:
        load_rank(checkpoint, TrainLayout(1), 0)
    hf["lm_head.weight"][3, 5] += 1
    with (
        HFCheckpoint(write_hf(tmp_path / "other", config, hf)) as checkpoint,
        pytest.raises(ConversionError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"),
    ):
        load_rank(checkpoint, TrainLayout(1), 0)


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


def test_load_tensors_reports_bytes_up_to_the_rank_size(moe_config, random_hf, tmp_path):
    layout, bound, reports = TrainLayout(2, ep=2), bound_rows(moe_config), []
    with HFCheckpoint(write_hf(tmp_path / "hf", moe_config, random_hf(moe_config))) as checkpoint:
        local = load_rank(checkpoint, layout, 1, bound)
        load_tensors(checkpoint, bound, layout, 1, local, on_read=lambda *report: reports.append(report))
    num_bytes = sum(tensor.nbytes for tensor in local.values())
    assert (reports[0], reports[-1]) == ((0, num_bytes), (num_bytes, num_bytes))
    assert len(reports) > 10
    assert reports == sorted(reports)


@pytest.mark.parametrize("max_shard_bytes", [3000, 10**9])
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
    assert_same(stored(tmp_path / "out"), hf)
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
