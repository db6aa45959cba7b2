"""Attention backends that TransformerEngine's Python code selects for simulated GPUs. cuDNN's support is decided in
C++; here cuDNN supports everything, so only the Python code's rejections remain."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

CAPABILITIES = [(7, 0), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)]
FLASH = [None, "2.7.2", "2.8.3", "2.8.3.post2", "2.8.3+cu13"]
FLASH_3 = [None, "3.0.0b1"]
HEADS = [(64, 64), (100, 100), (192, 128), (200, 200), (256, 256), (264, 264), (60, 512)]
DTYPES = ["bfloat16", "float32"]


@dataclass(frozen=True)
class Asked:
    """Simulated machine and model. `flash`, `flash_3`: versions of flash-attn and flash-attn-3; None: not installed."""

    capability: tuple[int, int]
    flash: str | None
    flash_3: str | None
    heads: tuple[int, int]
    dtype: str


def cases() -> Iterator[Asked]:
    for values in itertools.product(CAPABILITIES, FLASH, FLASH_3, HEADS, DTYPES):
        yield Asked(*values)


def answer(asked: Asked) -> dict[str, bool]:
    """Return whether flash-attn, and cuDNN if it supports everything, are used for packed rows in training."""
    import torch
    import transformer_engine.pytorch.attention.dot_product_attention.utils as te
    from packaging.version import Version

    utils = te.FlashAttentionUtils
    te.get_device_compute_capability = lambda: asked.capability
    oldest = utils.version_required_blackwell if asked.capability >= (10, 0) else utils.version_required
    utils.version = Version(asked.flash or "0")
    utils.is_installed = asked.flash is not None and oldest <= utils.version <= utils.max_version
    if utils.is_installed:
        utils.set_flash_attention_version()
    utils.v3_is_installed = asked.flash_3 is not None
    te.FusedAttnBackend = {"No_Backend": 0, "F16_max512_seqlen": 1, "F16_arbitrary_seqlen": 2, "FP8": 3}
    te.tex.get_fused_attn_backend = lambda *_: te.FusedAttnBackend["F16_arbitrary_seqlen"]
    parameters = te.AttentionParams(
        qkv_dtype=getattr(torch, asked.dtype),
        qkv_layout="thd_thd_thd",
        num_heads=8,
        num_gqa_groups=8,
        max_seqlen_q=64,
        max_seqlen_kv=64,
        head_dim_qk=asked.heads[0],
        head_dim_v=asked.heads[1],
        attn_mask_type="padding_causal",
        core_attention_bias_shape=None,
        is_training=True,
    )
    flash, fused, _ = te.get_attention_backend(parameters)[5]
    return {"flash": bool(flash), "fused": bool(fused)}
