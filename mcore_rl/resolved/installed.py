"""Detection of the packages that Megatron can use. A process with a GPU also checks that TransformerEngine can be
imported. `mcore-rl doctor` uses this on machines without any of them, so other packages are not imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_rl.errors import ConfigError

CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
FLA = ("flash-linear-attention", "fla-core")
FLASH_ATTENTION_3 = ("flash-attn-3", "flash_attn_3")
TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-torch", "transformer_engine")


def release(version: str | None) -> tuple[int, ...]:
    """Return the leading numbers of a version; () for None."""
    # Up to the first letter: 2.8.3rc1 counts as 2.8.3.
    numbers = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


def dotted(version: tuple[int, ...]) -> str:
    """Format (12, 9) as 12.9."""
    return ".".join(map(str, version))


def version_of(distributions: Sequence[str]) -> tuple[str, str] | None:
    """Return (name, version) of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def has_module(name: str) -> bool:
    """Return True if a top-level module can be found; imports nothing."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@dataclass(frozen=True)
class Installed:
    """Properties of a machine that determine how models are built. Versions are None if the package is absent; `cudnn`
    also if it is not from a Python package. `capability` is the CUDA device's, `cuda_version` is torch's; None if
    unknown. `gradient_fusion`: NVIDIA apex's kernel is installed. `linear_attention`: version of fla."""

    cuda: bool = False
    capability: tuple[int, int] | None = None
    transformer_engine: str | None = None
    flash_attention: str | None = None
    flash_attention_3: str | None = None
    cudnn: str | None = None
    gradient_fusion: bool = False
    deep_ep: bool = False
    cuda_version: tuple[int, ...] | None = None
    linear_attention: str | None = None


def here() -> Installed:
    """Detect the properties of this process; without an importable torch, only those that do not need it.

    Raises: ConfigError for an unusable TransformerEngine.
    """
    try:
        import torch

        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    except Exception:  # any error of loading its libraries; doctor reports it
        capability = None
    if capability is None:
        return look(cuda=False)
    return replace(look(cuda=True), capability=capability, cuda_version=release(torch.version.cuda)[:2] or None)


def look(*, cuda: bool) -> Installed:
    """Detect the packages of this Python environment, for processes with or without a CUDA device.

    Raises: ConfigError for a required TransformerEngine that cannot be imported.
    """
    return Installed(
        cuda=cuda,
        # Only a process that builds models for a GPU needs an importable one.
        transformer_engine=transformer_engine(imported=cuda),
        flash_attention=_version("flash_attn", ("flash-attn",)),
        flash_attention_3=_version("flash_attn_3", FLASH_ATTENTION_3),
        cudnn=_version("nvidia", CUDNN),
        gradient_fusion=has_module("fused_weight_gradient_mlp_cuda"),
        deep_ep=deep_ep(imported=cuda),
        linear_attention=_version("fla", FLA),
    )


def transformer_engine(*, imported: bool) -> str | None:
    """Return the version of TransformerEngine, None if it is not installed. With `imported` it must also be importable:
    only the import detects a missing library or a build for another torch, and Megatron ignores some of these errors.

    Raises: ConfigError if it is installed but cannot be imported.
    """
    version = _version("transformer_engine", TRANSFORMER_ENGINE)
    if version is None or not imported:
        return version
    _select_cudnn()
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # ImportError, OSError or RuntimeError of loading its libraries
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise ConfigError(
            f"transformer-engine {version} is installed, but transformer_engine.pytorch cannot be imported "
            f"({type(error).__name__}: {reason}); rebuild it for the installed torch (make setup EXTRA=gpu), or "
            "uninstall it: models are then built from megatron's local layers"
        ) from error
    return version


def _select_cudnn() -> None:
    """Make TransformerEngine load the cuDNN package of this environment, which torch uses, unless CUDNN_HOME or
    CUDNN_PATH is set."""
    # TransformerEngine (2.11) prefers libcudnn.so of the system. If the system's version differs, its parts and the
    # package's do not link: "libcudnn_heuristic.so.9: undefined symbol".
    if os.environ.get("CUDNN_HOME") or os.environ.get("CUDNN_PATH") or not has_module("nvidia"):
        return
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if any(Path(place).glob("cudnn/lib/libcudnn.so*")):
            os.environ["CUDNN_HOME"] = str(Path(place) / "cudnn")
            return


def deep_ep(*, imported: bool) -> bool:
    """Return True if Megatron (0.16.1) finds DeepEP. With `imported`, check the names that Megatron imports: DeepEP 2
    has moved them, and Megatron treats it as missing."""
    if not has_module("deep_ep") or not imported:
        return has_module("deep_ep")
    try:
        package, utils = importlib.import_module("deep_ep"), importlib.import_module("deep_ep.utils")
    except Exception:  # its library is missing or was built for another torch
        return False
    return hasattr(package, "Buffer") and hasattr(utils, "EventHandle") and hasattr(utils, "EventOverlap")


def _version(module: str, distributions: Sequence[str]) -> str | None:
    name_and_version = version_of(distributions) if has_module(module) else None
    return name_and_version[1] if name_and_version else None


def planned_machine(*, cuda: bool) -> Installed:
    """Return the assumed properties of the machines of a plan, independent of this machine: with GPUs, the packages
    that scripts/setup.sh installs, deep_ep in case it is requested, and fla in case a model needs it."""
    if not cuda:
        return Installed()
    return Installed(
        cuda=True,
        transformer_engine="2.11.0",
        flash_attention="2.8.3",
        gradient_fusion=True,
        deep_ep=True,
        linear_attention="0.4.0",
    )
