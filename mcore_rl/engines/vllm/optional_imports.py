"""Imports of vLLM's class for a model, which may need optional packages such as torchvision.

vLLM inspects the class in a subprocess, so that the import does not initialize CUDA in the engine's process. With a CPU
build of torch, the class is inspected in this process, which imports it anyway. The subprocess would import vLLM again:
10 CPU seconds for the first engine of a model type.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch

from mcore_rl.errors import ConfigError
from mcore_rl.weights.engine_config import optional_imports

T = TypeVar("T")

_LOWERING = "torch._inductor.lowering"


def check_imports(model_dir: str | Path) -> None:
    """Check that the packages which the family of a model declares are installed.

    Raises: ConfigError naming a package that is not installed.
    """
    architecture, packages = optional_imports(model_dir)
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"model.hf_path={model_dir}: vLLM's {architecture} needs {', '.join(missing)}, which is not "
            f"installed; install it with pip install --no-deps {' '.join(missing)}"
        )


def inspect_models_here() -> None:
    """Let vLLM inspect the classes of models in this process, unless torch is a CUDA build."""
    if torch.version.cuda is not None:
        return
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = _call


def import_without_lowering() -> None:
    """Import vLLM without torch._inductor.lowering, on CPUs: engines run eagerly there, and vLLM imports the module (1
    CPU second) only to add to a list that the compiler reads."""
    if torch.cuda.is_available() or _LOWERING in sys.modules:
        return
    # vLLM's import goes on without the module. Later imports find it again.
    sys.modules[_LOWERING] = None  # type: ignore[assignment]
    try:
        import vllm  # noqa: F401
    finally:
        del sys.modules[_LOWERING]


def _call(inspect: Callable[[], T]) -> T:
    return inspect()
