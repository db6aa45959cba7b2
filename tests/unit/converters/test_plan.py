from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
import torch

from model_converters.errors import ConversionError, LayoutError
from model_converters.families import family_for
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import export_pieces, export_plan, load_plan, local_shapes
from model_converters.mapping.table import bind
from tests.plans import assert_tiled, tiling_problems
from tests.unit.converters.hf_models import bound_rows


def test_export_plan_orders_tensors_by_layer(moe_config):
    groups = [plan.group for plan in export_plan(bound_rows(moe_config), TrainLayout(4, pp=2, ep=2))]
    distinct = [group for index, group in enumerate(groups) if index == 0 or groups[index - 1] != group]
    assert distinct == ["embedding", "layer.0", "layer.1", "layer.2", "layer.3", "head"]


def test_export_plan_balances_bytes_over_replicas(dense_config):
    layout = TrainLayout(16, tp=2, pp=2)
    written = Counter()
    for plan in export_plan(bound_rows(dense_config), layout):
        for piece in plan.pieces:
            written[piece.rank] += prod(plan.piece_shape(piece))
    assert set(written) == set(range(16))
    for stage in range(2):
        shares = [written[rank] for rank in range(8 * stage, 8 * stage + 8)]
        assert max(shares) < 2 * sum(shares) / len(shares)


def test_export_and_load_plans_use_only_holders(moe_config):
    layout = TrainLayout(16, tp=2, pp=2, ep=4, etp=2)
    bound = bound_rows(moe_config)
    sources = {
        (name, piece.start, piece.length, piece.rank)
        for rank in range(16)
        for load in load_plan(bound, layout, rank)
        for name, piece in load.sources
    }
    for plan in export_plan(bound, layout):
        for piece in plan.pieces:
            assert (plan.hf_name, piece.start, piece.length, piece.rank) in sources


def test_export_plan_512_ranks_is_complete(moe_config):
    """Every element has exactly one writer, and every rank writes."""
    config = moe_config | {"num_hidden_layers": 8, "num_experts": 128, "mlp_only_layers": []}
    bound = bound_rows(config)
    plans = export_plan(bound, TrainLayout(512, pp=2, ep=32))
    assert len(plans) == 8 * (128 * 3 + 9) + 3
    assert_tiled(bound, plans)
    assert len({piece.rank for plan in plans for piece in plan.pieces}) == 512


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 3, "tp": 3}, "num_key_value_heads 2 is neither a multiple nor a divisor of tp 3"),
        ({"world_size": 5, "tp": 5}, "num_attention_heads \\* head_dim 48 is not a multiple of tp 5"),
        ({"world_size": 3, "tp": 3}, "intermediate_size 20 is not a multiple of tp 3"),
        ({"world_size": 8, "etp": 8}, "moe_intermediate_size 4 is not a multiple of etp 8"),
        ({"world_size": 3, "pp": 3}, "4 layers .num_hidden_layers. cannot be divided evenly over 3 pipeline stages"),
    ],
)
def test_plan_indivisible_size_is_named(sizes, message, moe_config):
    with pytest.raises(LayoutError, match=message):
        export_plan(bound_rows(moe_config), TrainLayout(**sizes))


def test_plan_ep_without_experts_is_rejected(dense_config):
    with pytest.raises(LayoutError, match="ep 2 needs a model with experts"):
        export_plan(bound_rows(dense_config), TrainLayout(2, ep=2))


def test_plan_all_indivisible_sizes_are_named_at_once(moe_config):
    with pytest.raises(LayoutError) as caught:
        export_plan(bound_rows(moe_config), TrainLayout(9, tp=3, ep=3))
    for part in ("experts", "intermediate_size", "num_key_value_heads"):
        assert part in str(caught.value)


def test_check_complete_lists_all_problems_at_once(moe_config):
    bound = bound_rows(moe_config)
    layout = TrainLayout(2, ep=2)
    hf_names = [name for b in bound for name in b.hf if name != "lm_head.weight"] + ["model.extra.weight"]
    shapes = local_shapes(bound, layout, 0) | {"decoder.final_layernorm.weight": (13,), "decoder.spurious": (1,)}
    del shapes["decoder.layers.2.mlp.router.weight"]
    with pytest.raises(ConversionError) as caught:
        check_complete(bound, hf_names, shapes, layout=layout, rank=0)
    message = str(caught.value)
    for part in (
        "1 HF tensors missing: lm_head.weight",
        "1 HF tensors unknown: model.extra.weight",
        "1 model tensors missing: decoder.layers.2.mlp.router.weight",
        "1 model tensors unknown: decoder.spurious",
        "1 model tensors of another shape: decoder.final_layernorm.weight (13,) instead of (12,)",
    ):
        assert part in message


def test_tiling_problems_name_holes_and_overlaps(moe_config):
    """Other tests rely on this check of plans."""
    hole, double, *_ = export_plan(bound_rows(moe_config), TrainLayout(2, ep=2))
    first, other = hole.pieces[0], double.pieces[0]
    hole = replace(hole, pieces=(first._replace(start=2, length=first.length - 2),))
    double = replace(double, pieces=(other, other._replace(start=3, length=2)))
    problems = "\n".join(tiling_problems([hole, double]))
    assert f"{hole.hf_name}: [0, 2) of dim 0 is untiled" in problems
    assert f"{double.hf_name}: [3, 5) of dim 0 is claimed twice" in problems


def test_check_complete_accepts_complete_plan(moe_config):
    bound = bound_rows(moe_config)
    layout = TrainLayout(4, pp=2, ep=2)
    for rank in range(4):
        check_complete(bound, model_names=local_shapes(bound, layout, rank), layout=layout, rank=rank)
    check_complete(bound, [name for b in bound for name in b.hf], {b.mcore for b in bound}, layout=layout)


def test_export_pieces_missing_or_misshapen_tensor_is_rejected(dense_config):
    bound, layout = bound_rows(dense_config), TrainLayout(2, tp=2)
    plans = export_plan(bound, layout)
    local = {name: torch.zeros(shape) for name, shape in local_shapes(bound, layout, 1).items()}
    fc1 = "decoder.layers.0.mlp.linear_fc1.weight"
    whole = local[fc1]
    for broken in (whole[:-1], whole[:, :-1], whole[0]):
        local[fc1] = broken
        with pytest.raises(ConversionError, match=r"linear_fc1\.weight .* has no slice"):
            list(export_pieces(plans, local, 1))
    del local[fc1]
    with pytest.raises(ConversionError, match=r"rank 1 has no decoder\.layers\.0\.mlp\.linear_fc1\.weight"):
        list(export_pieces(plans, local, 1))


def test_bind_lists_all_names_claimed_twice(moe_config):
    rows = family_for(moe_config).rows(moe_config)
    qkv = next(row for row in rows if "linear_qkv" in row.mcore)
    other = replace(qkv, mcore="decoder.layers.{l}.other.weight", layers=(2,))
    with pytest.raises(ConversionError) as caught:
        bind([*rows, other, rows[0]], moe_config, torch.float32)
    for name in (
        "HF model.layers.2.self_attn.q_proj.weight is claimed by",
        "HF model.layers.2.self_attn.v_proj.weight is claimed by",
        "mcore embedding.word_embeddings.weight is claimed by",
    ):
        assert name in str(caught.value)
    assert "layers.1." not in str(caught.value)


def test_bind_layer_outside_model_is_rejected(moe_config):
    rows = [replace(row, layers=(3, 4)) if row.layers else row for row in family_for(moe_config).rows(moe_config)]
    with pytest.raises(ConversionError, match=r"is bound to layers \[4\] of 4"):
        bind(rows, moe_config, torch.float32)


def test_bind_placeholders_get_global_indices(moe_config):
    names = {b.mcore: b for b in bound_rows(moe_config)}
    bound = names["decoder.layers.3.mlp.experts.linear_fc1.weight7"]
    assert bound.hf == ("model.layers.3.mlp.experts.7.gate_proj.weight", "model.layers.3.mlp.experts.7.up_proj.weight")
    assert (bound.layer, bound.expert, bound.group) == (3, 7, "layer.3")
    assert not any("{" in name for name in names)
