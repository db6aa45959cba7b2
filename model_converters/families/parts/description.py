"""What a family says of itself to people; the table of supported families is printed from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REFUSED_BY_ALL: dict[str, Any] = {"dual_chunk_attention_config": {"chunk_size": 262144}, "is_causal": False}
"""Fields that hf_config.refuse_unsupported rejects for every family."""

REFUSED_BY_ATTENTION: dict[str, Any] = {
    **REFUSED_BY_ALL,
    "attention_bias": True,
    "hidden_act": "gelu",
    "layer_types": ["sliding_attention"],
    "quantization_config": {"quant_method": "gptq"},
}
"""What family.attention_sizes refuses for every family that calls it."""

REFUSED_ROTATIONS: dict[str, Any] = {
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    "partial_rotary_factor": 0.5,
}
"""What family.model_arguments refuses."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """One line of the table of supported families.

    models: names that people know. covers: what of the architecture loads, trains and exports. refused: fields of
    config.json that are refused by name, each with a value that is (tests set it and expect the error). vllm_cpu:
    "runs" where a test syncs the family into vLLM on CPU, else the error that vLLM gives.
    """

    models: str
    covers: str
    refused: Mapping[str, Any]
    vllm_cpu: str = "not tried"
