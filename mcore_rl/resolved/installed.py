"""What of the packages that megatron can use is installed; of a process with a GPU also whether TransformerEngine
imports. It imports the others only where it is asked to:
`mcore-rl doctor` asks on machines that have nothing yet."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_rl.errors import ConfigError
from mcore_rl.resolved.versions import release

CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
FLASH_ATTENTION_3 = ("flash-attn-3", "flash_attn_3")
TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-torch", "transformer_engine")


def version_of(distributions: Sequence[str]) -> tuple[str, str] | None:
    """(name, version) of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def has_module(name: str) -> bool:
    """Whether a top-level module could be found; imports nothing."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@dataclass(frozen=True)
class Installed:
    """Facts that decide what a model is built from. Versions of packages, None where they are absent; `cudnn` is None
    too where it is none of a Python package. `capability` is that of the CUDA device, `cuda_version` what torch was
    built for, None where they are not known; `gradient_fusion` the kernel of NVIDIA's apex."""

    cuda: bool = False
    capability: tuple[int, int] | None = None
    transformer_engine: str | None = None
    flash_attention: str | None = None
    flash_attention_3: str | None = None
    cudnn: str | None = None
    gradient_fusion: bool = False
    deep_ep: bool = False
    cuda_version: tuple[int, ...] | None = None


def here() -> Installed:
    """What this process can build models from; without a torch that imports, what can be said without one.

    Raises: ConfigError for a TransformerEngine that is there and of no use.
    """
    try:
        import torch

        cuda = torch.cuda.is_available()
        capability = torch.cuda.get_device_capability() if cuda else None
    except Exception:  # whatever the loader of its libraries meets; doctor names it
        return look(cuda=False)
    if not cuda:
        return look(cuda=False)
    return replace(look(cuda=True), capability=capability, cuda_version=release(torch.version.cuda)[:2] or None)


def look(*, cuda: bool) -> Installed:
    """What this Python has, for processes that have a CUDA device or not.

    Raises: ConfigError for a TransformerEngine that is there, is to be used and cannot be imported.
    """
    return Installed(
        cuda=cuda,
        transformer_engine=transformer_engine(imported=cuda),
        flash_attention=_version("flash_attn", ("flash-attn",)),
        flash_attention_3=_version("flash_attn_3", FLASH_ATTENTION_3),
        cudnn=_version("nvidia", CUDNN),
        gradient_fusion=has_module("fused_weight_gradient_mlp_cuda"),
        deep_ep=deep_ep(imported=cuda),
    )


def transformer_engine(*, imported: bool) -> str | None:
    """Its version; None where it is not installed. `imported`: it has to be of use as well. A library that is missing
    or was built for another torch shows only then, and megatron passes over some of these errors.

    Raises: ConfigError where it is installed and cannot be imported.
    """
    version = _version("transformer_engine", TRANSFORMER_ENGINE)
    if version is None or not imported:
        return version
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # ImportError, OSError, RuntimeError: whatever the loader of its libraries meets
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise ConfigError(
            f"transformer-engine {version} is installed, but transformer_engine.pytorch cannot be imported "
            f"({type(error).__name__}: {reason}); build it anew against the torch that is here (make setup EXTRA=gpu "
            "does), or uninstall it: models are then built from megatron's local layers"
        ) from error
    return version


def deep_ep(*, imported: bool) -> bool:
    """Whether megatron (0.16.1) finds DeepEP; `imported`: by the names that it imports. DeepEP 2 has them elsewhere,
    and megatron takes that for no DeepEP."""
    if not has_module("deep_ep") or not imported:
        return has_module("deep_ep")
    try:
        package, utils = importlib.import_module("deep_ep"), importlib.import_module("deep_ep.utils")
    except Exception:  # its library is missing, or of another torch: then there is none to choose
        return False
    return hasattr(package, "Buffer") and hasattr(utils, "EventHandle") and hasattr(utils, "EventOverlap")


def _version(module: str, distributions: Sequence[str]) -> str | None:
    name_and_version = version_of(distributions) if has_module(module) else None
    return name_and_version[1] if name_and_version else None


def planned_machine(*, cuda: bool) -> Installed:
    """What a plan takes for granted of the machines that it is for, whatever this one has: with GPUs the packages that
    scripts/setup.sh installs for them, and deep_ep for those who ask for it by name."""
    if not cuda:
        return Installed()
    return Installed(
        cuda=True, transformer_engine="2.11.0", flash_attention="2.8.3", gradient_fusion=True, deep_ep=True
    )
