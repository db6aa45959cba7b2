"""LoRA adapters of a model: target modules, weight table, and checks of an adapter to start from. Does not import
megatron.core, so that the driver can use it."""

from __future__ import annotations

from math import sqrt

import torch

from mcore_rl.config.models import LoraConfig
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.layout import conversion_errors
from model_converters.families import family_for
from model_converters.families.parts.adapter_rows import (
    PREFIX,
    adapter_rows,
    default_targets,
    leaf,
    shared_with_experts,
)
from model_converters.families.parts.hf_config import HFConfig
from model_converters.hf.adapter_reader import CONFIG_NAME, LoraAdapter
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.separate import trainer_rows
from model_converters.mapping.table import BoundRow, Row, bind


def scale_of(lora: LoraConfig) -> float:
    """Return the factor of the product B A that is added to a weight."""
    return lora.alpha / (sqrt(lora.rank) if lora.rslora else lora.rank)


def base_rows(hf_config: HFConfig, layout: TrainLayout | None = None) -> list[Row]:
    """Return the weight table of the base model: the tensors that the ranks of `layout` hold, or the family's table."""
    rows = family_for(hf_config).rows(hf_config)
    return rows if layout is None else trainer_rows(rows, layout)


def targets_of(lora: LoraConfig, hf_config: HFConfig) -> list[str]:
    """Return the names of the modules that have an adapter, sorted."""
    return sorted(lora.target_modules or default_targets(base_rows(hf_config)))


def bound_adapters(
    lora: LoraConfig, hf_config: HFConfig, dtype: torch.dtype, layout: TrainLayout | None = None
) -> list[BoundRow]:
    """Return the weight table of the adapters with exact names, with `layout` for its ranks. The adapters' PEFT names,
    shapes and number of parameters do not depend on it.

    Raises: ConfigError naming actor.lora.target_modules.
    """
    with conversion_errors(f"actor.lora.target_modules={list(lora.target_modules)}: "):
        rows = adapter_rows(base_rows(hf_config), lora.target_modules, lora.rank, layout)
        return bind(rows, hf_config, dtype)


def check_adapter(lora: LoraConfig, hf_config: HFConfig) -> LoraAdapter:
    """Read the adapter of lora.path and check that rank, scale and modules match `lora`.

    Raises: ConfigError naming the key to change.
    """
    key = f"actor.lora.path={lora.path}"
    # Only names and shapes are compared, so the dtype does not matter.
    bound = bound_adapters(lora, hf_config, torch.float32)
    shapes = {
        name: shape
        for bound_row in bind(base_rows(hf_config), hf_config, torch.float32)
        for name, shape in zip(bound_row.hf, bound_row.row.shapes, strict=True)
    }
    with conversion_errors(f"{key}: "):
        adapter = LoraAdapter(str(lora.path), shapes)
    # PEFT allows a different rank and scale per module; the trainer uses the same for all adapters.
    ranks = {update.a.shape[0] for update in adapter.updates.values()}
    if ranks != {lora.rank}:
        raise ConfigError(f"{key} has rank {', '.join(map(str, sorted(ranks)))}; set actor.lora.rank to it (one only)")
    scales = {update.scale for update in adapter.updates.values()}
    if scales != {scale_of(lora)}:
        raise ConfigError(
            f"{key} scales by {', '.join(map(str, sorted(scales)))}, but actor.lora.alpha={lora.alpha} and "
            f"actor.lora.rslora={lora.rslora} by {scale_of(lora)}; set them to lora_alpha and use_rslora of its "
            f"{CONFIG_NAME}"
        )
    # Sets, because files and tables order the names differently.
    wanted = {name for row in bound for name in row.hf}
    stored = {f"{PREFIX}{u.module}.lora_{side}.weight" for u in adapter.updates.values() for side in "AB"}
    if wanted != stored:
        modules = sorted({leaf(update.module) for update in adapter.updates.values()})
        raise ConfigError(
            f"{key} has {len(adapter.updates)} modules, called {', '.join(modules)}; actor.lora.target_modules asks "
            f"for {len(wanted) // 2}, called {', '.join(targets_of(lora, hf_config))}; set it to the modules that "
            "the adapter has in every layer"
        )
    return adapter


def check_peft_names(lora: LoraConfig, hf_config: HFConfig) -> None:
    """Raise ConfigError for modules whose adapters PEFT would apply to other modules."""
    targets = targets_of(lora, hf_config)
    shared = shared_with_experts(base_rows(hf_config), targets)
    if shared:
        left = ", ".join(target for target in targets if target not in shared)
        raise ConfigError(
            f"trainer.export_adapter: in a model with routed experts, PEFT would apply {', '.join(shared)} to the "
            f"experts; set actor.lora.target_modules=[{left}], or leave trainer.export_adapter at null and set "
            "trainer.export_hf, which has the adapters merged"
        )


def adapter_identity(lora: LoraConfig, hf_config: HFConfig) -> dict[str, object] | None:
    """Return the description of the adapters that a checkpoint records; None without LoRA."""
    if not lora.rank:
        return None
    targets = targets_of(lora, hf_config)
    return {"rank": lora.rank, "alpha": lora.alpha, "rslora": lora.rslora, "target_modules": targets}
