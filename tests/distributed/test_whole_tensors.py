"""What Megatron ranks give to engines that pull: vLLM's pass over a rank's layers yields the checkpoint's tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.tiny_models import write_tiny_model

LAYOUTS: dict[str, dict[str, int]] = {"tp2 ep2 etp2": {"tp": 2, "ep": 2, "etp": 2}, "tp2 pp2": {"tp": 2, "pp": 2}}


def _given(rank: int, directory: str, layouts: dict[str, dict[str, int]]) -> dict[str, dict[str, np.ndarray]]:
    return {name: _of_layout(rank, directory, layout) for name, layout in layouts.items()}


def _of_layout(rank: int, directory: str, layout: dict[str, int]) -> dict[str, np.ndarray]:
    import torch.distributed as dist

    from mcore_rl.engines.vllm.rdt_producer import HeldTensors
    from mcore_rl.megatron.roles.actor import MegatronActor
    from mcore_rl.megatron.roles.shards import gather_shards
    from mcore_rl.weights.whole import WholeTensors
    from model_converters.families import family_for
    from model_converters.mapping.table import bind

    config = policy_batch.config(directory, layout, 24)
    actor = MegatronActor(config, rank, dist.get_world_size(), None)
    rows = bind(family_for(actor.hf_config).rows(actor.hf_config), actor.hf_config, actor._dtype)
    source = HeldTensors(WholeTensors(rows, actor.layout, rank, gather_shards), actor.tensors)
    given: dict[str, np.ndarray] = {}
    for names, tensors in source.iter_groups():
        assert {name for name, tensor in zip(names, tensors, strict=True) if tensor is not None} == (
            set(names) & source.held_names()
        )
        given |= {n: t.float().numpy().copy() for n, t in zip(names, tensors, strict=True) if t is not None}
    return given


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("whole") / "moe", "qwen3_moe")


@pytest.fixture(scope="module")
def given(checkpoint: Path) -> list[Any]:
    return launch(_given, 4, str(checkpoint), LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_give_what_the_checkpoint_has(layout: str, given: list[Any], checkpoint: Path) -> None:
    expected = load_file(checkpoint / "model.safetensors")
    of_ranks = [of_rank[layout] for of_rank in given]
    for tensors in of_ranks:
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, expected[name].float().numpy(), err_msg=name)
    assert set().union(*of_ranks) == set(expected)
    assert all(set(tensors) != set(expected) for tensors in of_ranks), "no rank has the whole model"
