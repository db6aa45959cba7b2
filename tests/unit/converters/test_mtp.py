"""Multi-token-prediction layers: kept or dropped, with copies of embedding and head."""

from __future__ import annotations

import pytest

from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.families.parts.mtp import num_mtp_layers, resolve_copies, resolve_mtp, without_mtp
from model_converters.hf.io import HFCheckpoint
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import load_plan
from tests.unit.converters.hf_models import assert_same, bound_rows, load_rank, write_hf

FAMILIES = ("deepseek_v3", "glm4_moe")
EMBEDDING = "embedding.word_embeddings.weight"


@pytest.mark.parametrize("family", FAMILIES)
def test_resolve_mtp_stored_layers_are_kept_or_all_dropped(family, family_configs, random_hf):
    config = family_configs[family]
    hf = random_hf(config)
    ordinary = random_hf(config | {"num_nextn_predict_layers": 0})
    assert resolve_mtp(config, hf) == (config, ())
    check_complete(bound_rows(config), list(hf))
    # A name with the same first digits is not part of the layer.
    resolved, dropped = resolve_mtp(config, [*hf, "model.layers.40.enorm.weight"], keep=False)
    assert resolved == without_mtp(config) == config | {"num_nextn_predict_layers": 0}
    assert set(dropped) == set(hf) - set(ordinary)
    check_complete(bound_rows(resolved), list(hf), dropped=dropped)
    with pytest.raises(ConversionError, match=r"unknown: model\.layers\.4\.input_layernorm\.weight"):
        check_complete(bound_rows(resolved), list(hf))


def test_resolve_mtp_without_tensors_ignores_config_count(family_configs, random_hf):
    """transformers does not save these layers, but keeps num_nextn_predict_layers in config.json."""
    config = family_configs["deepseek_v3"]
    saved = random_hf(without_mtp(config))
    for keep in (True, False):
        resolved, dropped = resolve_mtp(config, saved, keep=keep)
        assert (num_mtp_layers(resolved), dropped) == (0, ())
        check_complete(bound_rows(resolved), list(saved), dropped=dropped)


def test_resolve_mtp_partial_tensors_are_reported_missing(family_configs, random_hf):
    config = family_configs["deepseek_v3"]
    hf = random_hf(config)
    del hf["model.layers.4.eh_proj.weight"]
    resolved, dropped = resolve_mtp(config, hf)
    with pytest.raises(ConversionError, match=r"1 HF tensors missing: model\.layers\.4\.eh_proj\.weight"):
        check_complete(bound_rows(resolved), list(hf), dropped=dropped)
    hf["model.layers.5.enorm.weight"] = hf["model.layers.4.enorm.weight"]
    resolved, dropped = resolve_mtp(config, hf, keep=False)
    with pytest.raises(ConversionError, match=r"1 HF tensors unknown: model\.layers\.5\.enorm\.weight"):
        check_complete(bound_rows(resolved), list(hf), dropped=dropped)


@pytest.mark.parametrize(("pp", "read"), [(1, "model.embed_tokens"), (2, "model.layers.4.embed_tokens")])
def test_mtp_last_stage_reads_embedding_copy(pp, read, family_configs):
    layout = TrainLayout(pp, pp=pp)
    loads = {load.mcore_name: load for load in load_plan(bound_rows(family_configs["deepseek_v3"]), layout, pp - 1)}
    assert [name for name, _ in loads[EMBEDDING].sources] == [f"{read}.weight"]
    assert [name for name, _ in loads["output_layer.weight"].sources] == ["lm_head.weight"]
    assert loads["output_layer.weight"].copies == ("model.layers.4.shared_head.head.weight",)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("shared", ["embed_tokens", "shared_head.head"])
def test_load_tensors_differing_mtp_copy_is_rejected(shared, pp, family_configs, random_hf, tmp_path):
    config = family_configs["deepseek_v3"]
    layout = TrainLayout(2 * pp, tp=2, pp=pp)
    hf = random_hf(config)
    hf[f"model.layers.4.{shared}.weight"][-1, 3] += 1  # in the last rank's half
    with (
        HFCheckpoint(write_hf(tmp_path / "hf", config, hf)) as checkpoint,
        pytest.raises(ConversionError, match=rf"layers\.4\.{shared}\.weight.*between multi-token prediction and the"),
    ):
        load_rank(checkpoint, layout, layout.world_size - 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ({"num_nextn_predict_layers": True}, "num_nextn_predict_layers is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings with num_nextn_predict_layers 1"),
        ({"first_k_dense_replace": 4}, "only one of layer 4 and the last decoder layer has experts"),
        ({"moe_layer_freq": 2}, "only one of layer 4 and the last decoder layer has experts"),
    ],
)
def test_mtp_rows_unsupported_by_megatron_are_rejected(changes, message, family_configs):
    config = family_configs["deepseek_v3"] | changes
    with pytest.raises(ConversionError, match=message):
        family_for(config).rows(config)


def test_mtp_rows_several_layers_are_consecutive(family_configs, random_hf):
    config = family_configs["glm4_moe"] | {"num_nextn_predict_layers": 2}
    bound = bound_rows(config)
    check_complete(bound, list(random_hf(config)))
    assert family_for(config).model_arguments(config).mtp_num_layers == 2
    names = {row.mcore: row.hf for row in bound}
    assert names["mtp.layers.1.final_layernorm.weight"] == ("model.layers.5.shared_head.norm.weight",)
    # Last stage of two: one embedding, read once.
    loads = [load.mcore_name for load in load_plan(bound, TrainLayout(2, pp=2), 1)]
    assert loads.count(EMBEDDING) == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", ["absent", "diverged"])
@pytest.mark.parametrize("pp", [1, 2])
def test_resolve_copies_absent_or_differing_use_main_tensors(
    pp, case, family, family_configs, random_hf, local_mcore, tmp_path
):
    """GLM-4.6 has no copies; with `main` the main model's tensors replace copies that differ."""
    config, layout = family_configs[family], TrainLayout(2 * pp, tp=2, pp=pp)
    hf = random_hf(config)
    wanted = local_mcore(hf, config, layout, layout.world_size - 1)
    if case == "absent":
        del hf["model.layers.4.embed_tokens.weight"], hf["model.layers.4.shared_head.head.weight"]
    else:
        for copy in ("embed_tokens", "shared_head.head"):
            hf[f"model.layers.4.{copy}.weight"] = hf[f"model.layers.4.{copy}.weight"] + 1
    with HFCheckpoint(write_hf(tmp_path / "hf", config, hf)) as checkpoint:
        bound, dropped = resolve_copies(bound_rows(config), checkpoint.shapes, "equal" if case == "absent" else "main")
        assert len(dropped) == (0 if case == "absent" else 2)
        assert_same(load_rank(checkpoint, layout, layout.world_size - 1, bound, dropped=dropped), wanted)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "kimi_k2"])
def test_resolve_mtp_count_zero_drops_stored_layers(family, family_configs, random_hf):
    """Error messages recommend count 0, and the checkpoint still has the layers."""
    config = family_configs[family]
    two = random_hf(config | {"num_nextn_predict_layers": 2})
    zero = config | {"num_nextn_predict_layers": 0}
    ordinary = random_hf(zero)
    for keep in (True, False):
        resolved, dropped = resolve_mtp(zero, two, keep=keep)
        assert resolved == zero
        assert set(dropped) == set(two) - set(ordinary)
        check_complete(bound_rows(resolved), list(two), dropped=dropped)


def test_resolve_mtp_count_zero_keeps_decoder_layers(family_configs, random_hf):
    """Decoder layers beyond num_hidden_layers may be a mistake in config.json: they must not be dropped."""
    config = family_configs["deepseek_v3"] | {"num_nextn_predict_layers": 0}
    hf = random_hf(config | {"num_hidden_layers": 5})
    assert resolve_mtp(config, hf)[1] == ()
    with pytest.raises(ConversionError, match=r"unknown: model\.layers\.4\."):
        check_complete(bound_rows(config), list(hf))
