"""vLLM with rollout.quantization=int4: words and scales arrive bit for bit, and it computes with their values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from safetensors.torch import save_file

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.int4 import codes_and_scales
from tests.contract.engines import LATENT
from tests.contract.hf_trainer import hf_tensors
from tests.contract.quantised_session import Session, logp_gaps
from tests.contract.update_checks import check_recovery
from tests.selection import on_demand_unless

SIZES = {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 2, "moe_intermediate_size": 128}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "groups of 32": ("qwen3_moe", SIZES, {"quantization_group": 32}),
    "groups of 128": ("qwen3_moe", SIZES, {"quantization_group": 128}),
    "latent attention": ("deepseek_v3", {**SIZES, **LATENT}, {"quantization_group": 32}),
    "whole experts on two ranks": ("qwen3_moe", SIZES, {"quantization_group": 32, "tp": 2, "expert_parallel": True}),
    "slices of experts on two ranks": (
        "mixtral",
        {**SIZES, "intermediate_size": 128},
        {"quantization_group": 32, "tp": 2},
    ),
}
"""Family, fields of the model, and keys of rollout."""
CASES = [pytest.param(name, marks=on_demand_unless(name == "groups of 32")) for name in MODELS]


@pytest.fixture(scope="module", params=CASES)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    session = Session(
        tmp_path_factory.mktemp("model"), *MODELS[request.param], quantization="int4", std=0.1, bucket=64 << 10
    )
    yield session
    session.engine.shutdown()


def rounded_model(session: Session, model: Any, directory: Path) -> Any:
    """Load transformers' model in float32, with experts that compressed-tensors packed and unpacked."""
    from transformers import AutoModelForCausalLM

    values = {}
    for name, tensor in hf_tensors(model).items():
        values[name] = tensor.float().contiguous()
        if ".experts." in name:
            codes, scales = codes_and_scales(tensor, session.keys["quantization_group"])
            words = pack_to_int32(codes.flatten(1).to(torch.int8), 4)
            unpacked = unpack_from_int32(words, 4, tensor.shape).float()
            values[name] = (
                unpacked * scales.float().repeat_interleave(session.keys["quantization_group"], 1)
            ).contiguous()
    model.save_pretrained(directory)
    save_file(values, directory / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def test_updates_arrive_and_are_computed_with(session: Session, tmp_path: Path) -> None:
    trainer = session.trainer(1)
    for version in (1, 2, 3):
        trainer.model = session.model(version)
        trainer.publish(version)
        trainer.overwrite_buffers()  # the engine must not read the buffers after the update
        assert trainer.certify() > 30
        gaps = np.abs(logp_gaps(session.engine, rounded_model(session, trainer.model, tmp_path)))
        print(f"gaps: mean {gaps.mean():.4f}, median {np.median(gaps):.4f}, largest {gaps.max():.3f}")
        # bfloat16 arithmetic. Not the mean, since rounding routes some tokens to other experts.
        assert np.median(gaps) < 0.05
    trainer.model.load_state_dict(session.model(10).state_dict())
    with pytest.raises(WeightSyncError, match=r"\d differ: "):
        trainer.certify()
    gaps = np.abs(logp_gaps(session.engine, rounded_model(session, trainer.model, tmp_path)))
    assert np.median(gaps) > 0.2


def _experts(engine: Any) -> Any:
    model = engine._engine.model_executor.driver_worker.worker.model_runner.get_model()
    return dict(model.named_modules())["model.layers.1.mlp.experts.routed_experts"]


def _change_word(engine: Any) -> str:
    _experts(engine).w13_weight.data[1, 200, 7] ^= 1 << 20
    return "model.layers.1.mlp.experts.1.up_proj.weight_packed"


def _change_scale(engine: Any) -> str:
    """Change a scale in the memory that the kernel reads."""
    _experts(engine).quant_method.moe_kernel.fused_experts.w2_scale[2, 1, 0] *= 1 + 2**-7
    return "model.layers.1.mlp.experts.2.down_proj.weight_scale"


@pytest.mark.parametrize("change", [_change_word, _change_scale], ids=lambda change: change.__name__)
def test_certificate_one_changed_bit_is_named(session: Session, change: Any) -> None:
    if session.engine.settings["rollout_config"].tp > 1:
        pytest.skip("the ranks run in other processes")
    trainer = session.trainer(5)
    trainer.publish(5)
    trainer.certify()
    name = session.engine.call(change)
    with pytest.raises(WeightSyncError, match=f"1 differ: {name}$"):
        trainer.certify()
    trainer.publish(6)  # an update corrects it
    trainer.certify()


def test_update_after_broken_update_is_complete(session: Session) -> None:
    trainer = session.trainer(7)
    for received in (0, trainer.plan.num_rounds - 1):
        check_recovery(session.engine, trainer, received, greedy=False)
