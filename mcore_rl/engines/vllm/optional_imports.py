"""Implementations of models that import an optional package, such as torchvision.

vLLM inspects the class of a model in a subprocess, where torchvision's wheel fails to load beside a CPU build of torch:
it registers kernels of operators that only its own CUDA library declares. Here these operators are declared before the
import, and the class is inspected in this process.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from mcore_rl.errors import ConfigError
from model_converters.families import family_for
from model_converters.families.parts.hf_config import read_hf_config

_TORCHVISION = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Schemas of torchvision 0.28 whose fake kernels are registered on import."""


def import_model(model_dir: str | Path) -> None:
    """Import vLLM's class for a model whose family declares optional packages, and register it in this process.

    Raises: ConfigError naming a package that is not installed.
    """
    family = family_for(read_hf_config(model_dir))
    if not family.vllm_imports:
        return
    missing = [name for name in family.vllm_imports if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"model.hf_path={model_dir}: vLLM's {family.architecture} needs {', '.join(missing)}, which is not "
            f"installed; install it with pip install --no-deps {' '.join(missing)}"
        )
    if torch.version.cuda is None:
        _declare_operators()
    from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel

    registered = ModelRegistry.models[family.architecture]
    ModelRegistry.models[family.architecture] = _RegisteredModel.from_model_cls(registered.load_model_cls())


def _declare_operators() -> None:
    for name, schema in _TORCHVISION.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)
