"""TrainLayout compared with Megatron's process groups on a fake backend and with its division of layers.

A child process simulates all ranks of worlds of up to 512 ranks; no collective runs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model_converters.errors import LayoutError
from model_converters.families import family_for
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.pipeline_layout import parse_stages
from model_converters.mapping.table import bind
from tests.distributed.converting import alone
from tests.plans import local_shapes_by_rank
from tests.tiny_models import tiny_fields

WORLDS: list[dict[str, int]] = [
    {"world_size": 1},
    {"world_size": 8, "tp": 2},
    {"world_size": 8, "tp": 2, "etp": 2, "ep": 2},
    {"world_size": 8, "pp": 2, "ep": 4},
    {"world_size": 8, "tp": 2, "cp": 2},
    {"world_size": 8, "tp": 2, "cp": 2, "ep": 4},
    {"world_size": 8, "cp": 4, "ep": 2, "etp": 2},
    {"world_size": 16, "tp": 2, "cp": 2, "pp": 2, "ep": 8},
    {"world_size": 16, "tp": 2, "pp": 2, "ep": 2, "etp": 4},
    {"world_size": 16, "tp": 4, "pp": 2, "ep": 4, "etp": 1},
    {"world_size": 24, "tp": 2, "pp": 3, "ep": 2, "etp": 2},
    {"world_size": 512, "tp": 1, "pp": 16, "ep": 32},
    {"world_size": 512, "tp": 8, "pp": 4, "cp": 2, "ep": 16, "etp": 2},
]
STAGES: list[tuple[int, dict[str, int]]] = [
    (8, {"pp": 4}),
    (16, {"pp": 2, "vpp": 4}),
    (16, {"pp": 4, "vpp": 2}),
    (61, {"pp": 16, "first_stage_layers": 3, "last_stage_layers": 2}),
    (15, {"pp": 4, "first_stage_layers": 3}),
    (14, {"pp": 4, "last_stage_layers": 2}),
    (5, {"pp": 2, "first_stage_layers": 2, "last_stage_layers": 3}),
    (20, {"pp": 4, "vpp": 2, "first_stage_layers": 4, "last_stage_layers": 4}),
    (16, {"pp": 3, "vpp": 2, "first_stage_layers": 4}),
]
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (4, {"pp": 2, "pipeline_layout": "Ettt|tL"}),
    (4, {"pp": 2, "pipeline_layout": "E|t|tt|tL"}),
    (3, {"pp": 3, "pipeline_layout": "Et*2|t|L"}),
    (61, {"pp": 16, "pipeline_layout": "E|(tt|)*30tL"}),
    (62, {"pp": 11, "pipeline_layout": "Et*2(|t*3)*20|L"}),
    (8, {"pp": 3, "pipeline_layout": "Et,t|(t|t)*2|tt|L"}),
]
STRINGS = """
    EttL Et|tL Ettt|(tt|)*29,m|L E|(tt|)*30tmL Et*3|(tt|)*29m|L xt |EL EL|| (t|t)*3 t*3|L E(|t)*4L Ett*2L
    (Et|)*1tL E(tt|)*0L t*0 (t*2|)*3 ((t)*2|)*2 (t*2 t)*2 t*2*3 E|*3L (tt|*3 t**2 *3 () ()*2 (t)*a ,,E,t,|,L, E.L
    Em|L EttmmL e|l Et|tL* (EtL)*2 E*2 L*0 |*4 t*١
""".split()


def megatron_coordinates(sizes: dict[str, int], ranks: list[int]) -> list[tuple[int, ...]]:
    """Return tp, cp, dp, pp, ep, etp, edp of every rank from Megatron's process groups; runs in the child."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = []
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes["world_size"])
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=sizes.get("tp", 1),
                pipeline_model_parallel_size=sizes.get("pp", 1),
                context_parallel_size=sizes.get("cp", 1),
                expert_model_parallel_size=sizes.get("ep", 1),
                expert_tensor_parallel_size=sizes.get("etp", 1),
                create_gloo_process_groups=False,
            )
            found.append(
                (
                    parallel_state.get_tensor_model_parallel_rank(),
                    parallel_state.get_context_parallel_rank(),
                    parallel_state.get_data_parallel_rank(),
                    parallel_state.get_pipeline_model_parallel_rank(),
                    parallel_state.get_expert_model_parallel_rank(),
                    parallel_state.get_expert_tensor_parallel_rank(),
                    parallel_state.get_expert_data_parallel_rank(),
                )
            )
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return found


def megatron_stages(num_layers: int, sizes: dict[str, int]) -> list[list[tuple[int, int]]]:
    """Return (first layer, end) by [stage][chunk] as built by Megatron; runs in the child."""
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    options: dict[str, Any] = {
        "pipeline_model_parallel_size": sizes["pp"],
        "virtual_pipeline_model_parallel_size": sizes.get("vpp"),
        "num_layers_in_first_pipeline_stage": sizes.get("first_stage_layers"),
        "num_layers_in_last_pipeline_stage": sizes.get("last_stage_layers"),
        "pipeline_dtype": torch.float32,
    }
    config = TransformerConfig(num_layers=num_layers, hidden_size=8, num_attention_heads=2, **options)
    stages: list[list[tuple[int, int]]] = []
    for stage in range(sizes["pp"]):
        chunks = range(sizes["vpp"]) if "vpp" in sizes else [None]
        starts = [get_transformer_layer_offset(config, chunk, stage) for chunk in chunks]
        counts = [get_num_layers_to_build(config, chunk, stage) for chunk in chunks]
        stages.append([(start, start + count) for start, count in zip(starts, counts, strict=True)])
    return stages


def megatron_layers(text: str, pp: int) -> list[list[list[int]]]:
    """Return layers by [stage][chunk] of a layout string as assigned by Megatron; runs in the child."""
    from megatron.core import parallel_state
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = PipelineParallelLayerLayout(text, pp)
    vpp = layout.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
    try:
        return [[layout.get_layer_id_list(vp_stage=chunk, pp_rank=rank) for chunk in range(vpp)] for rank in range(pp)]
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


def megatron_parses(texts: list[str]) -> list[list[str] | None]:
    """Return the stages of every string from Megatron's parser, None if it raises; runs in the child."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "loss": "L", "decoder": "t", "mtp": "m"}
    found: list[list[str] | None] = []
    for text in texts:
        try:
            stages = PipelineParallelLayerLayout.parse_str_to_list(text)
        except AssertionError:
            found.append(None)
        else:
            found.append(["".join(letters[layer.name] for layer in stage) for stage in stages])
    return found


@pytest.mark.parametrize("sizes", WORLDS, ids=str)
def test_train_layout_coordinates_equal_megatron(sizes: dict[str, int]) -> None:
    layout = TrainLayout(**sizes)
    world = layout.world_size
    ranks = list(range(world)) if world <= 24 else [0, 33, 255, 330, 511]
    found = alone(megatron_coordinates, sizes, ranks)
    assert [tuple(layout.coordinates(rank)) for rank in ranks] == found


@pytest.mark.parametrize(("num_layers", "sizes"), STAGES, ids=str)
def test_train_layout_stages_equal_megatron(num_layers: int, sizes: dict[str, int]) -> None:
    found = alone(megatron_stages, num_layers, sizes)
    ours = TrainLayout(sizes["pp"], **sizes).stage_layers(num_layers)
    assert [[(layers.start, layers.stop) for layers in chunks] for chunks in ours] == found


@pytest.mark.parametrize(("num_layers", "sizes"), LAYOUTS, ids=str)
def test_pipeline_layout_assigns_layers_like_megatron(num_layers: int, sizes: dict[str, Any]) -> None:
    found = alone(megatron_layers, sizes["pipeline_layout"], sizes["pp"])
    ours = TrainLayout(sizes["pp"], **sizes).stage_layers(num_layers)
    assert [[list(layers) for layers in chunks] for chunks in ours] == found


def megatron_shapes(hf_config: dict[str, Any], layout: TrainLayout) -> list[dict[str, tuple[int, ...]]]:
    """Return the tensors of every rank's model with their shapes; runs in the child."""
    from mcore_rl.megatron.model.sharded import rank_state

    return [dict(rank_state(hf_config, layout, rank).shapes) for rank in range(layout.world_size)]


@pytest.mark.parametrize(
    "sizes",
    [
        {"world_size": 4, "pp": 2, "ep": 2, "pipeline_layout": "Ett|ttmL"},
        # The final norm is on another stage than the output projection and multi-token prediction.
        {"world_size": 2, "pp": 2, "pipeline_layout": "Ett|t|t|mL"},
    ],
    ids=str,
)
def test_pipeline_layout_ranks_hold_tensors_of_the_weight_table(sizes: dict[str, Any]) -> None:
    config = tiny_fields("deepseek_v3", num_nextn_predict_layers=1)
    layout = TrainLayout(**sizes)
    bound = bind(family_for(config).rows(config), config, torch.float32)
    found = alone(megatron_shapes, config, layout)
    assert found == [dict(shapes) for shapes in local_shapes_by_rank(bound, layout)]


def test_pipeline_layout_strings_are_parsed_like_megatron() -> None:
    """Compare every string and every pair of strings, which gives new repetitions and new invalid strings."""
    texts = [*STRINGS, *(a + b for a in STRINGS for b in STRINGS)]
    expected = alone(megatron_parses, texts)
    assert None in expected
    for text, stages in zip(texts, expected, strict=True):
        assert _parsed(text) == stages, text


def _parsed(text: str) -> list[str] | None:
    try:
        return list(parse_stages(text))
    except LayoutError:
        return None
