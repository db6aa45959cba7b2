"""FP8 recipes: what megatron calls them, what each needs, and why a machine cannot have one."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.roles import KeyNames
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.installed import Installed
from mcore_rl.resolved.versions import dotted, release


@dataclass(frozen=True)
class Recipe:
    """`format` is megatron's word. Needs TransformerEngine and CUDA of at least these versions, and a GPU of a compute
    capability from `capability` to before `below`; rows of a multiple of `tokens`."""

    format: str
    engine: tuple[int, int]
    capability: tuple[int, int]
    tokens: int = 16
    below: tuple[int, int] | None = None
    cuda: tuple[int, int] = (12, 1)

    def lacks(self, installed: Installed) -> str:
        """What keeps this machine from it, for a message that has named it; "" where nothing does."""
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
    """Tokens that the part of a packed row that one rank multiplies with must be a multiple of."""
    return 1 if fp8 == "none" else RECIPES[fp8].tokens


def require_recipe(fp8: str, installed: Installed, *, engine: bool, names: KeyNames) -> None:
    """Raises: ConfigError for a recipe that does not exist or that this machine cannot have. `engine` says whether the
    model is built from TransformerEngine's layers."""
    key = f"{names.key('fp8')}={fp8}"
    if fp8 not in RECIPES:
        raise ConfigError(f"{key} must be one of none, {', '.join(RECIPES)}")
    if not installed.cuda:
        raise ConfigError(f"{key} needs a CUDA device; set it to none")
    lacks = RECIPES[fp8].lacks(installed) or ("" if engine else "needs layers of transformer-engine")
    if lacks:
        raise ConfigError(f"{key} {lacks}; set {names.key('fp8')} to another recipe or none")
