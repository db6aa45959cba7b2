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
from mcore_rl.weights.engine_config import optional_imports

_TORCHVISION = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Schemas of torchvision 0.28 whose fake kernels are registered on import."""


def import_model(model_dir: str | Path) -> None:
    """Import vLLM's class for a model whose family declares optional packages, and register it in this process.

    Raises: ConfigError naming a package that is not installed.
    """
    architecture, packages = optional_imports(model_dir)
    if not packages:
        return
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"model.hf_path={model_dir}: vLLM's {architecture} needs {', '.join(missing)}, which is not "
            f"installed; install it with pip install --no-deps {' '.join(missing)}"
        )
    declare_operators()
    from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel

    registered = ModelRegistry.models[architecture]
    ModelRegistry.models[architecture] = _RegisteredModel.from_model_cls(registered.load_model_cls())


def declare_operators() -> None:
    """Declare the operators that torchvision's wheel for CUDA needs beside a CPU build of torch, before its import.

    transformers imports torchvision as well, wherever it is installed.
    """
    if torch.version.cuda is not None:
        return
    for name, schema in _TORCHVISION.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)
