"""Description of a family for users; the catalogue of families is generated from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

REFUSED_BY_ALL: dict[str, object] = {"dual_chunk_attention_config": {"chunk_size": 262144}, "is_causal": False}
"""Fields that hf_config.refuse_unsupported rejects for every family."""

REFUSED_BY_ATTENTION: dict[str, object] = {
    **REFUSED_BY_ALL,
    "attention_bias": True,
    "hidden_act": "gelu",
    "layer_types": ["sliding_attention"],
    "quantization_config": {"quant_method": "gptq"},
}
"""Fields that family.grouped_attention rejects, with an example value."""

REFUSED_ROTATIONS: dict[str, object] = {
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    "partial_rotary_factor": 0.5,
}
"""Fields that family.model_arguments rejects, with an example value."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """One row of the catalogue of families.

    models: names of well-known models.
    covers: supported features of the architecture.
    refused: fields of config.json that are rejected, each with a rejected value (tests set it and expect the error).
    vllm_cpu: "runs" if a test syncs the family into vLLM on CPU, else the error that vLLM raises.
    """

    models: str
    covers: str
    refused: Mapping[str, object]
    vllm_cpu: str = "not tried"
