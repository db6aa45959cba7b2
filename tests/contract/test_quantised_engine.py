"""vLLM with rollout.quantization=fp8: codes and scales arrive bit for bit, and it computes with the values that they
represent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.errors import WeightSyncError
from model_converters.families import family_for
from model_converters.hf.quant import EXPORT_BLOCK, ScaleWindow, quantise
from model_converters.mapping.table import bind
from tests.contract.engines import LATENT
from tests.contract.hf_trainer import hf_tensors
from tests.contract.quantised_session import Session, logp_gaps
from tests.contract.update_checks import check_recovery
from tests.selection import on_demand_unless

SIZES = {"hidden_size": 256, "num_hidden_layers": 2, "head_dim": 128, "intermediate_size": 256}
"""Two ranks divide them into whole blocks of 128 x 128."""
EXPERTS = {**SIZES, "moe_intermediate_size": 256}
HEADS = {"qk_nope_head_dim": 64, "v_head_dim": 64}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("qwen3", SIZES, {}),
    "experts": ("qwen3_moe", EXPERTS, {}),
    "latent attention": ("deepseek_v3", {**EXPERTS, **LATENT, **HEADS, "q_lora_rank": 128}, {}),
    "two ranks": ("qwen3", SIZES, {"tp": 2}),
    "whole experts on two ranks": ("qwen3_moe", EXPERTS, {"tp": 2, "expert_parallel": True}),
    "slices of experts on two ranks": ("mixtral", SIZES, {"tp": 2}),
}
"""Family, fields of the model, and keys of rollout."""
ALWAYS_TESTED = ("experts", "two ranks")
CASES = [pytest.param(name, marks=on_demand_unless(name in ALWAYS_TESTED)) for name in MODELS]


@pytest.fixture(scope="module", params=CASES)
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    session = Session(
        tmp_path_factory.mktemp("model"), *MODELS[request.param], quantization="fp8", std=0.06, bucket=256 << 10
    )
    yield session
    session.engine.shutdown()


def rounded_model(session: Session, model: Any, directory: Path) -> Any:
    """Load transformers' model with the values that codes and scales of the marked rows represent, in float32."""
    from transformers import AutoModelForCausalLM

    fields = model.config.to_dict()
    rows = bind(family_for(fields).rows(fields), fields, torch.bfloat16)
    marked = {name for bound in rows if bound.row.fp8 for name in bound.hf}
    values = {}
    for name, tensor in hf_tensors(model).items():
        values[name] = tensor.float().contiguous()
        if name in marked:
            codes, scales = quantise(tensor)
            window = ScaleWindow(scales, EXPORT_BLOCK, row=0, column=0, shape=tuple(tensor.shape))
            window.dequantise(codes, values[name], row=0, column=0)
    model.save_pretrained(directory)
    save_file(values, directory / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def test_update_codes_arrive_and_are_computed_with(session: Session, tmp_path: Path) -> None:
    trainer = session.trainer(1)
    for version in (1, 2):
        trainer.model = session.model(version)
        trainer.publish(version)
        trainer.overwrite_buffers()  # the engine must not read the buffers after the update
        assert trainer.certify() > 30
        gaps = logp_gaps(session.engine, rounded_model(session, trainer.model, tmp_path))
        # bfloat16 arithmetic. Not the mean, since rounding routes some tokens to other experts.
        assert np.median(np.abs(gaps)) < 0.05
        trainer.model = session.model(10 + version)
        with pytest.raises(WeightSyncError, match=r"differ.*weight_scale_inv"):
            trainer.certify()
        gaps = logp_gaps(session.engine, rounded_model(session, trainer.model, tmp_path))
        assert np.median(np.abs(gaps)) > 0.2


def _modules(engine: Any) -> dict[str, Any]:
    return dict(engine._engine.model_executor.driver_worker.worker.model_runner.get_model().named_modules())


def _change_code(engine: Any) -> str:
    module = _modules(engine)["model.layers.1.self_attn.o_proj"]
    module.weight.data.view(torch.uint8)[5, 7] ^= 1
    return "model.layers.1.self_attn.o_proj.weight"


def _change_scale(engine: Any) -> str:
    module = _modules(engine)["model.layers.0.self_attn.o_proj"]
    module.weight_scale_inv.data[1, 0] *= 1 + 2**-23
    return "model.layers.0.self_attn.o_proj.weight_scale_inv"


def _change_expert_code(engine: Any) -> str:
    module = _modules(engine)["model.layers.1.mlp.experts.routed_experts"]
    module.w13_weight.data[3].view(torch.uint8)[300, 7] ^= 1
    return "model.layers.1.mlp.experts.3.up_proj.weight"


def _change_expert_scale(engine: Any) -> str:
    """Change a scale in the memory that the kernel reads."""
    module = _modules(engine)["model.layers.1.mlp.experts.routed_experts"]
    module.quant_method.moe_kernel.fused_experts.w2_scale[2, 1, 0] *= 1 + 2**-23
    return "model.layers.1.mlp.experts.2.down_proj.weight_scale_inv"


def _change_absorbed(engine: Any) -> str:
    module = _modules(engine)["model.layers.1.self_attn.mla_attn.mla_attn"]
    module.W_UK_T.data[1, 3, 5] += 0.25
    return "model.layers.1.self_attn.kv_b_proj.weight"


ONE_RANK = tuple(name for name, (_, _, keys) in MODELS.items() if "tp" not in keys)
CHANGES = {
    _change_code: ONE_RANK,
    _change_scale: ONE_RANK,
    _change_expert_code: ("experts", "latent attention"),
    _change_expert_scale: ("experts", "latent attention"),
    _change_absorbed: ("latent attention",),
}
"""Change of one element -> models with such a tensor, on one rank, which runs in the engine's process."""


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_certificate_one_changed_element_is_named(
    session: Session, change: Any, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["session"] not in CHANGES[change]:
        pytest.skip("the model has no such tensor, or two ranks")
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
    for received in (0, 3, trainer.plan.num_rounds - 1):
        check_recovery(session.engine, trainer, received, greedy=False)


def _codes_are_unpacked(engine: Any) -> bool | None:
    """Return whether codes that vLLM has packed for AMX are read back; None if vLLM cannot pack them on this CPU. Its
    build for AVX512 can also pack them without AMX, the one for AVX2 cannot."""
    from mcore_rl.engines.vllm.held_fp8 import pack_codes
    from mcore_rl.engines.vllm.packing import unpacked

    if not hasattr(torch.ops._C, "convert_weight_packed"):
        return None
    codes = torch.randint(0, 256, (256, 384), dtype=torch.uint8).view(torch.float8_e4m3fn)
    packed = pack_codes(codes[None])[0]
    is_permuted = not torch.equal(packed.view(torch.uint8), codes.view(torch.uint8))
    return is_permuted and torch.equal(unpacked(packed, pack_codes).view(torch.uint8), codes.view(torch.uint8))


def test_codes_packed_for_amx_are_read_back(session: Session) -> None:
    unpacked = session.engine.call(_codes_are_unpacked)
    if unpacked is None:
        pytest.skip("vLLM packs codes only on CPUs with AVX512")
    assert unpacked
