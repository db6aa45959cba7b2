"""Expert bias of routers (e_score_correction_bias): it influences routing, stays float32, and gets no gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.tiny_models import GROUPS, write_tiny_model

MODEL = {"num_hidden_layers": 2, **GROUPS}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "v3", "deepseek_v3", **MODEL))


def _stored(directory: str | Path) -> torch.Tensor:
    with safe_open(Path(directory) / "model.safetensors", "pt") as file:
        return file.get_tensor(BIAS)


def test_expert_bias_and_groups_of_tiny_models_change_routing(directory: str) -> None:
    """Check the test data: with a bias of 0, or groups that never exclude an expert, the parity tests would be
    meaningless."""
    model = policy_batch.reference_model(directory)
    tokens = torch.from_numpy(np.concatenate([policy_batch.sequence(sample) for sample in range(9)]).astype(np.int64))

    def chosen() -> torch.Tensor:
        found = []
        hook = model.model.layers[1].mlp.gate.register_forward_hook(lambda _m, _i, out: found.append(out[2]))
        with torch.no_grad():
            model(tokens[None])
        hook.remove()
        return found[0].sort(-1).values

    router = model.model.layers[1].mlp.gate
    usual, bias = chosen(), router.e_score_correction_bias.clone()
    router.e_score_correction_bias.zero_()
    unbiased = chosen()
    router.e_score_correction_bias.copy_(bias)
    router.topk_group = router.num_group
    unlimited = chosen()
    for other in (unbiased, unlimited):
        assert (usual != other).any(-1).float().mean() > 0.2


LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({"ep": 2}, "decoder.layers.1.mlp.router.expert_bias"),
    ({"strategy": "fsdp2"}, BIAS),
]
"""Layout, and the canonical name of the bias."""


def _bias_by_layout(rank: int, directory: str, root: str) -> list[dict[str, Any]]:
    return [_bias_through_an_update(directory, f"{root}/{n}", *layout) for n, layout in enumerate(LAYOUTS)]


def _bias_through_an_update(directory: str, root: str, layout: dict[str, Any], name: str) -> dict[str, Any]:
    """Values of the bias at every stage of a bfloat16 run, on the rank that holds it."""
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from mcore_rl.megatron.roles.export import export_hf
    from tests.distributed.saving import save_checkpoint

    config = policy_batch.config(directory, layout, 24)
    config.model.dtype = "bfloat16"
    config.actor.optimizer.lr = 1e-2
    actor = policy_batch.build_actor(config)
    seen = {"loaded": actor.tensors()[name].clone()}
    policy_batch.update_once(actor)
    seen["updated"] = actor.tensors()[name].clone()
    save_checkpoint(f"{root}/checkpoint", actor)
    actor.tensors()[name].zero_()
    load_checkpoint(f"{root}/checkpoint", actor)
    seen["restored"] = actor.tensors()[name].clone()
    export_hf(actor, f"{root}/exported", directory)
    return {station: (str(bias.dtype), bias.float().numpy()) for station, bias in seen.items()}


def test_expert_bias_in_bfloat16_model_keeps_float32_bits(directory: str, tmp_path: Path) -> None:
    stored = _stored(directory)
    assert not torch.equal(stored, stored.bfloat16().float())
    for station, (dtype, bias) in (
        item for rank in launch(_bias_by_layout, 2, directory, str(tmp_path)) for seen in rank for item in seen.items()
    ):
        assert dtype == "torch.float32", station
        np.testing.assert_array_equal(bias, stored.numpy(), err_msg=station)
    for number in range(len(LAYOUTS)):
        exported = _stored(tmp_path / str(number) / "exported")
        assert exported.dtype == torch.float32
        assert torch.equal(exported, stored)
