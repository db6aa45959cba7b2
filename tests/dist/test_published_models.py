"""DeepSeek-V3 as published, 671B parameters on 512 ranks: what megatron builds on a rank is what the table says.

One child process is rank after rank on a fake process group, the model on the meta device: no memory, no collective.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Executor, ProcessPoolExecutor
from math import prod
from typing import Any

import pytest
import torch

from model_converters.families import family_for
from model_converters.layout import TrainLayout
from model_converters.plan import local_shapes
from model_converters.table import bind
from tests.unit.converters.test_published_moe import DEEPSEEK_V3

UNEVEN = {"first_stage_layers": 3, "last_stage_layers": 2}
LAYOUTS: list[dict[str, int]] = [{"pp": 16, "ep": 32, **UNEVEN}, {"tp": 8, "pp": 16, "ep": 8, **UNEVEN}]


@pytest.fixture(scope="module")
def child():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


def built(sizes: dict[str, int], rank: int) -> dict[str, tuple[tuple[int, ...], str, str]]:
    """Canonical name -> shape, dtype and device of what megatron builds as `rank` of 512; runs in the child."""
    from mcore_rl.megatron import cpu

    cpu.install()
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mcore_rl.config.schema import ActorConfig, ModelConfig, ParallelConfig
    from mcore_rl.megatron import parallel
    from mcore_rl.megatron.layout import train_layout
    from mcore_rl.megatron.model import build_model
    from mcore_rl.megatron.names import canonical_tensors

    layout = train_layout(ParallelConfig(**sizes), 512, DEEPSEEK_V3)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=512)
    try:
        parallel.initialize_groups(layout, timeout_seconds=60, seed=0, gloo_groups=False)
        with torch.device("meta"):
            chunks = build_model(DEEPSEEK_V3, ActorConfig(), ModelConfig(hf_path="", dtype="bfloat16"), layout)
        tensors = canonical_tensors(chunks)
        return {name: (tuple(t.shape), str(t.dtype), t.device.type) for name, t in tensors.items()}
    finally:
        parallel.destroy()


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_stage_holds_what_the_table_says(sizes: dict[str, Any], child: Executor) -> None:
    layout = TrainLayout(512, **sizes)
    bound = bind(family_for(DEEPSEEK_V3).rows(DEEPSEEK_V3), DEEPSEEK_V3, torch.bfloat16)
    wide = {row.mcore for row in bound if row.dtype == torch.float32}
    parameters = 0
    for stage in range(16):
        rank = stage * 32 + 7 * (stage % 4)  # not always the first of its stage
        found = child.submit(built, sizes, rank).result(timeout=100)
        assert {name: shape for name, (shape, _, _) in found.items()} == local_shapes(bound, layout, rank)
        assert {device for _, _, device in found.values()} == {"meta"}
        assert {name for name, (_, dtype, _) in found.items() if dtype == "torch.float32"} == wide & set(found)
        for name, (shape, _, _) in found.items():
            parameters += prod(shape) * (layout.ep if ".experts." in name and "shared" not in name else 1)
    if layout.tp == 1:
        # What the two copies beside the last layer add on disk is one embedding here, on the last stage.
        assert parameters == 684_489_845_504 - 129_280 * 7168
