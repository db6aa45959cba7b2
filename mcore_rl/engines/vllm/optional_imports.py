"""Check of the optional packages, such as torchvision, that vLLM's implementation of a model imports."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mcore_rl.errors import ConfigError
from mcore_rl.weights.engine_config import optional_imports


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
