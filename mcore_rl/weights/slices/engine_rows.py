"""Rows of the weight table in an engine: which ones it loads, quantises and divides."""

from __future__ import annotations

from mcore_rl.config.quantization import FP8, UNQUANTIZED
from mcore_rl.weights.slices.engine_layout import EngineLayout
from model_converters.mapping.table import Row

FUSED_MODULES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "qkv": ("qkv", "qkv", "qkv"),  # one HF module in vision towers
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    # q, k and v of a gated delta net are one HF module.
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_qkv", "in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""HF modules in the engines' fused modules, in the order of their rows. Parts of one name are one module."""


def is_loaded(row: Row, layout: EngineLayout) -> bool:
    """Return whether an engine loads a row.

    Its head is tied to the embedding if the model's is, and draft layers share embedding and head with the model.
    """
    if row.place == "mtp":
        return layout.draft_layers and not row.repeats
    return not row.copy_of_embedding


def row_quantization(row: Row, quantization: str) -> str:
    """Return the quantisation of a row's tensors with this value of rollout.quantization."""
    quantises = row.fp8 and (quantization == FP8 or row.num_experts > 0)
    return quantization if quantises else UNQUANTIZED


def is_divided(row: Row) -> bool:
    """Return whether the ranks of an engine hold different parts of a row's tensors."""
    return row.axis != "none" and not row.whole_in_engines
