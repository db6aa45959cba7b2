"""Qwen3.5 and 3.6, with and without vision tower: gated delta nets and gated attention, dense MLPs or routed experts.

Source: transformers models/qwen3_5, models/qwen3_5_moe.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from model_converters.families.parts import delta_net, family, vision
from model_converters.families.parts.arguments import ModelArguments
from model_converters.families.parts.hf_config import HFConfig, integer
from model_converters.families.parts.hybrid import SECTIONS, SHARED_EXPERT, hybrid_arguments, hybrid_table
from model_converters.families.parts.vision_family import with_tower
from model_converters.mapping.table import Row


def _rows(config: HFConfig, *, sparse: bool) -> list[Row]:
    return hybrid_table(config, [sparse] * integer(config, "num_hidden_layers"), separate=True)


def _model_arguments(config: HFConfig, *, sparse: bool) -> ModelArguments:
    return hybrid_arguments(config, [sparse] * integer(config, "num_hidden_layers"))


_COVERS = (
    "gated delta nets, grouped queries with QK norms and output gate, partial rotation, zero-centred norms, "
    "multi-token prediction (kept by conversions and trained on request)"
)
QWEN3_5 = family.Family(
    "qwen3_5_text",
    partial(_rows, sparse=False),
    partial(_model_arguments, sparse=False),
    defaults={**delta_net.DEFAULTS, "num_key_value_heads": 4},
    architecture="Qwen3_5ForCausalLM",
    own_fields=SECTIONS,
    vllm_imports=("torchvision",),  # for images, also in the classes of text models
    description=family.Description(
        models="Qwen3.5 0.8B to 27B, Qwen3.6-27B (text)",
        covers=f"{_COVERS}, tied or untied embeddings",
        refused=delta_net.REFUSED,
        vllm_cpu="runs",
    ),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    build_rows=partial(_rows, sparse=True),
    build_arguments=partial(_model_arguments, sparse=True),
    defaults={**delta_net.DEFAULTS, "num_key_value_heads": 2},
    architecture="Qwen3_5MoeForCausalLM",
    own_fields=SECTIONS | SHARED_EXPERT,
    description=replace(
        QWEN3_5.description,
        models="Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B, Qwen3.6-35B-A3B (text)",
        covers=f"{_COVERS}, routed experts, gated shared expert",
        refused={**delta_net.REFUSED, "num_experts_per_tok": 1},
    ),
)

_MROPE = (11, 11, 10)
"""Default of mrope_section in transformers."""
_REFUSED_BY_ENGINES = {
    "sglang": "SGLang 0.5.23 imports a kernel for it that its CPU build lacks (fused_sigmoid_mul_cpu)"
}
_IMAGES = "vision tower, positions in time, height and width (no videos)"
QWEN3_5_VL = with_tower(
    QWEN3_5,
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    tower=vision.qwen3_tower,
    sections=_MROPE,
    interleaved=True,
    models="Qwen3.5 0.8B to 27B, Qwen3.6-27B",
    covers=f"all of qwen3_5_text, {_IMAGES}",
    vllm_cpu="runs",
    refused_by_engines=_REFUSED_BY_ENGINES,
)
QWEN3_5_VL_MOE = with_tower(
    QWEN3_5_MOE,
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    tower=vision.qwen3_tower,
    sections=_MROPE,
    interleaved=True,
    models="Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B, Qwen3.6-35B-A3B",
    covers=f"all of qwen3_5_moe_text, {_IMAGES}",
    vllm_cpu="runs",
    refused_by_engines=_REFUSED_BY_ENGINES,
)
