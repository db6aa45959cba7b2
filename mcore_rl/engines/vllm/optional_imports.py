"""Implementations of models that import an optional package, such as torchvision.

vLLM inspects the class of a model in a subprocess, where torchvision's wheel may fail to load beside a CPU build of
torch (vision/operators.py). Here its operators are declared first, and the class is inspected in this process.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mcore_rl.errors import ConfigError
from mcore_rl.vision.operators import declare_operators
from mcore_rl.weights.engine_config import optional_imports


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
