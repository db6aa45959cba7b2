"""FP8 recipes: Megatron's names, requirements, and checks of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.roles import KeyNames
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.installed import Installed
from mcore_rl.resolved.versions import dotted, release


@dataclass(frozen=True)
class Recipe:
    """FP8 recipe. `format` is Megatron's name. Requires at least these versions of TransformerEngine and CUDA, a GPU
    with compute capability from `capability` to below `below`, and rows of a multiple of `tokens` tokens."""

    format: str
    engine: tuple[int, int]
    capability: tuple[int, int]
    tokens: int = 16
    below: tuple[int, int] | None = None
    cuda: tuple[int, int] = (12, 1)

    def lacks(self, installed: Installed) -> str:
        """Return why this machine does not support the recipe, as the rest of a sentence about it; "" if it does."""
        engine = installed.transformer_engine
        if engine is None or release(engine) < self.engine:
            return f"needs transformer-engine {dotted(self.engine)} or newer, but {engine or 'none'} is installed"
        if installed.cuda_version is not None and installed.cuda_version < self.cuda:
            return f"needs a torch for CUDA {dotted(self.cuda)} or newer, not {dotted(installed.cuda_version)}"
        found, before = installed.capability, self.below
        if found is None or (found >= self.capability and (before is None or found < before)):
            return ""
        until = f", before {dotted(before)}" if before else ""
        return (
            f"needs a GPU of compute capability {dotted(self.capability)} or newer{until}, but this one has "
            f"{dotted(found)}"
        )


RECIPES = {
    "delayed": Recipe("hybrid", (1, 11), (8, 9)),
    "tensorwise": Recipe("hybrid", (2, 2), (8, 9)),
    "blockwise": Recipe("e4m3", (2, 3), (9, 0), cuda=(12, 9)),
    "mxfp8": Recipe("e4m3", (2, 1), (10, 0), tokens=32, below=(12, 0)),
}
"""Source: megatron.core.fp8_utils (0.16.1), and the checks in TransformerEngine's pytorch/quantization.py (2.11)."""


def row_multiple(fp8: str) -> int:
    """Return the number of tokens of which each rank's part of a packed row must be a multiple."""
    return 1 if fp8 == "none" else RECIPES[fp8].tokens


def require_recipe(fp8: str, installed: Installed, *, engine: bool, names: KeyNames) -> None:
    """Check a recipe. `engine`: the model is built from TransformerEngine's layers.

    Raises: ConfigError for a recipe that does not exist or that this machine does not support.
    """
    key = f"{names.key('fp8')}={fp8}"
    if fp8 not in RECIPES:
        raise ConfigError(f"{key} must be one of none, {', '.join(RECIPES)}")
    if not installed.cuda:
        raise ConfigError(f"{key} needs a CUDA device; set it to none")
    lacks = RECIPES[fp8].lacks(installed) or ("" if engine else "needs layers of transformer-engine")
    if lacks:
        raise ConfigError(f"{key} {lacks}; set {names.key('fp8')} to another recipe or none")
