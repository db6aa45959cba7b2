"""Selection of the TransformerEngine attention backend for a model's packed rows, with reasons against the others, and
requirements of torch's flash attention, which computes the rows that TransformerEngine does not support.

TransformerEngine itself checks this only when it computes the first row, and does not report a reason. This module
imports neither TransformerEngine nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mcore_rl.config.roles import POLICY, KeyNames
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.installed import Installed, dotted, release


@dataclass(frozen=True)
class HeadDims:
    """Head sizes of queries and keys, and of values."""

    keys: int
    values: int

    def __str__(self) -> str:
        return str(self.keys) if self.keys == self.values else f"{self.keys} (keys) and {self.values} (values)"


@dataclass(frozen=True)
class Backend:
    """Attention backend, named as in TransformerEngine. `lacks` returns why it does not support a model's rows, or
    ""."""

    name: str
    needs: str
    lacks: Callable[[Installed, HeadDims], str]


SHORT_DTYPES = ("bfloat16", "float16")
"""Data types of all attention kernels for packed rows on GPUs."""
FLASH_VERSIONS = ((2, 1, 1), (2, 8, 3))
"""Oldest and newest flash-attn that TransformerEngine 2.11 uses."""
FLASH_ON_BLACKWELL = (2, 7, 3)
"""Oldest flash-attn that TransformerEngine uses on compute capability 10.0 and above."""
WIDE_FLASH = ((8, 0), (9, 0), (10, 0), (12, 0))
"""Compute capabilities on which flash-attn supports head sizes above 192."""
CUDNN_FOR_ROWS = (9, 6)
"""Oldest cuDNN whose fused attention supports packed rows."""


def _flash(installed: Installed, heads: HeadDims) -> str:
    first, last = FLASH_VERSIONS
    # Assume Hopper if this machine has no GPU, as in `mcore-rl plan`.
    capability = installed.capability or (9, 0)
    if capability >= (10, 0):
        first = FLASH_ON_BLACKWELL
    if capability < (8, 0):
        return _capability("8.0", installed)
    if installed.flash_attention is None:
        return f"flash-attn is not installed (versions {dotted(first)} to {dotted(last)})"
    # A post-release of the last version, such as 2.8.3.post1, is not supported either.
    if not (first, False) <= _release(installed.flash_attention) <= (last, False):
        return f"flash-attn {installed.flash_attention} is not in {dotted(first)} to {dotted(last)}"
    if heads.keys != heads.values:
        return "it requires values of the same size as the keys"
    if heads.keys % 8 or heads.keys > 256:
        return "it supports head sizes that are multiples of 8, up to 256"
    if heads.keys > 192 and capability not in WIDE_FLASH:
        return f"it supports head sizes up to 192 on compute capability {dotted(capability)}"
    return ""


def _flash_3(installed: Installed, heads: HeadDims) -> str:
    # Hopper is assumed without a GPU, as in _flash.
    if (installed.capability or (9, 0)) != (9, 0):
        return _capability("9.0", installed)
    if installed.flash_attention_3 is None:
        return "flash-attn-3 is not installed"
    if heads.keys > 256:
        return "it supports head sizes up to 256"
    unequal = (128 < heads.keys <= 192 and 96 < heads.values <= 128) or (heads.keys <= 64 and heads.values <= 512)
    if heads.keys != heads.values and not unequal:
        return "values of another size need keys of 129 to 192 and values of 97 to 128, or up to 64 and up to 512"
    return ""


def _fused(installed: Installed, heads: HeadDims) -> str:
    capability = installed.capability or (9, 0)
    if not (9, 0) <= capability < (12, 0):
        return _capability("9.0 to 11", installed)
    # The version of a cuDNN that is not from a Python package is unknown.
    if installed.cudnn is not None and release(installed.cudnn)[:2] < CUDNN_FOR_ROWS:
        return f"cuDNN {dotted(CUDNN_FOR_ROWS)} or newer is needed, but {installed.cudnn} is installed"
    if heads.keys % 8 or heads.values % 8:
        return "it supports head sizes that are multiples of 8"
    largest = 256 if capability < (10, 0) else 128
    # The head sizes of DeepSeek-V3, 192 and 128, are supported although they exceed the limit.
    if max(heads.keys, heads.values) > largest and (heads.keys, heads.values) != (192, 128):
        return f"it supports head sizes up to {largest} on compute capability {dotted(capability)}"
    return ""


BACKENDS = (
    Backend("FusedAttention", "cuDNN 9.6, compute capability 9 to 11, heads of multiples of 8", _fused),
    Backend("FlashAttention 3", "flash-attn-3, compute capability 9.0", _flash_3),
    Backend("FlashAttention 2", "flash-attn 2.1.1 to 2.8.3, capability 8, heads of multiples of 8 up to 256", _flash),
)
"""TransformerEngine's order of preference from Hopper on; before Hopper, FusedAttention does not support packed rows.
None supports float32. Sources: TransformerEngine 2.11, common/fused_attn/fused_attn.cpp and
pytorch/attention/dot_product_attention/utils.py. Its unfused attention, which supports float32, is excluded: it stores
the scores of all pairs of tokens and does not support context parallelism."""


def pick(installed: Installed, dtype: str, heads: HeadDims, names: KeyNames = POLICY) -> Backend:
    """Return the backend that TransformerEngine will select; `names` has the keys of the model for errors.

    Raises: ConfigError naming the key, if no backend supports the rows.
    """
    if dtype not in SHORT_DTYPES:
        raise ConfigError(
            f"{names.dtype_key}={dtype}: attention on GPUs takes packed rows in {' or '.join(SHORT_DTYPES)} only; set "
            f"{names.dtype_key}=bfloat16"
        )
    lacking = {}
    for backend in BACKENDS:
        lacking[backend.name] = backend.lacks(installed, heads)
        if not lacking[backend.name]:
            return backend
    reasons = "; ".join(f"{name}: {reason}" for name, reason in lacking.items())
    raise ConfigError(
        f"{names.checkpoint}: no attention on this GPU supports packed rows with head size {heads} ({reasons}); "
        "install what is missing, use another model, or uninstall transformer-engine: attention is then torch's"
    )


FLASH_NEEDS = (8, 0)
"""Lowest compute capability for torch's flash attention. Source, also for the dtypes and the largest head: torch 2.13,
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp."""
LARGEST_FLASH_HEAD = 256


def check_torch_flash(installed: Installed, dtype: str, heads: HeadDims, reason: str, names: KeyNames = POLICY) -> None:
    """Check that torch's flash attention supports a model's rows. reason: why it is needed.

    Raises: ConfigError naming the key.
    """
    if dtype not in SHORT_DTYPES:
        raise ConfigError(
            f"{names.dtype_key}={dtype}: {reason}, and torch's flash attention takes {' or '.join(SHORT_DTYPES)} only; "
            f"set {names.dtype_key}=bfloat16"
        )
    capability, head = installed.capability or FLASH_NEEDS, max(heads.keys, heads.values)
    lacks = ""
    if capability < FLASH_NEEDS:
        lacks = f"needs compute capability {dotted(FLASH_NEEDS)}, but this GPU has {dotted(capability)}"
    elif head > LARGEST_FLASH_HEAD:
        lacks = f"supports head sizes up to {LARGEST_FLASH_HEAD}, but the model has {heads}"
    if lacks:
        raise ConfigError(
            f"{names.checkpoint}: {reason}, and torch's flash attention {lacks}; use another GPU or another model"
        )


def _capability(wanted: str, installed: Installed) -> str:
    return f"it needs compute capability {wanted}, and this GPU has {dotted(installed.capability or ())}"


def _release(version: str) -> tuple[tuple[int, ...], bool]:
    """Return the version numbers, and True for a version after that release (a post-release or a local build)."""
    return release(version), bool(re.search(r"post|\+", version))
