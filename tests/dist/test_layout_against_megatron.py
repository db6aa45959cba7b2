"""TrainLayout against Megatron itself: its process groups on a fake backend, and its division of layers.

One child process is rank after rank of worlds of up to 512; no collective runs.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import pytest

from model_converters.layout import TrainLayout

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


@pytest.fixture(scope="module")
def child():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


def megatron_coordinates(sizes: dict[str, int], ranks: list[int]) -> list[tuple[int, ...]]:
    """tp, cp, dp, pp, ep, etp, edp of every rank, as Megatron's process groups have them; runs in the child."""
    from mcore_rl.megatron.cpu import install

    install()
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
    """(first layer, end) by [stage][chunk], as Megatron builds them; runs in the child."""
    from mcore_rl.megatron.cpu import install

    install()
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


@pytest.mark.parametrize("sizes", WORLDS, ids=str)
def test_every_rank_sits_where_megatron_puts_it(sizes: dict[str, int], child: Executor) -> None:
    layout = TrainLayout(**sizes)
    world = layout.world_size
    ranks = list(range(world)) if world <= 24 else [0, 1, 7, 33, 100, 255, 256, 330, 510, 511]
    found = child.submit(megatron_coordinates, sizes, ranks).result(timeout=100)
    assert [tuple(layout.coordinates(rank)) for rank in ranks] == found


@pytest.mark.parametrize(("num_layers", "sizes"), STAGES, ids=str)
def test_every_stage_has_the_layers_that_megatron_builds(
    num_layers: int, sizes: dict[str, int], child: Executor
) -> None:
    found = child.submit(megatron_stages, num_layers, sizes).result(timeout=100)
    ours = TrainLayout(sizes["pp"], **sizes).stage_layers(num_layers)
    assert [[(layers.start, layers.stop) for layers in chunks] for chunks in ours] == found
