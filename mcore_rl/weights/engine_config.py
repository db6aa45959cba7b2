"""Layout of an inference engine, and fields of config.json that are overridden when it starts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from mcore_rl.config.quantization import GROUPS, INT4, UNQUANTIZED
from mcore_rl.config.roles import POLICY
from mcore_rl.config.sampling import MTP
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.engine_rows import row_quantization
from model_converters import families
from model_converters.errors import ConversionError
from model_converters.families.parts.hf_config import HFConfig, read_hf_config
from model_converters.hf.fp8_export import quantised_fields
from model_converters.mapping.table import Row, bind
from model_converters.vision_model import nested_overrides


def engine_layout(rollout: RolloutConfig) -> EngineLayout:
    """Return the layout of an engine's rollout.tp ranks."""
    return EngineLayout.of_ranks(
        rollout.tp,
        expert_parallel=rollout.expert_parallel,
        data_parallel_attention=rollout.data_parallel_attention,
        draft_layers=rollout.draft == MTP,
    )


def engine_overrides(
    model_dir: str | Path,
    *,
    load_weights: bool,
    key: str = POLICY.checkpoint,
    quantization: str = UNQUANTIZED,
    group: int = GROUPS[-1],
) -> dict[str, object]:
    """Return the config.json fields that the engine must read with other values than `model_dir` has.

    key: name of the directory in errors. quantization, group: rollout.quantization and its group, for an engine that
    gets its weights from the trainer.

    Raises: ConfigError for a directory or a model_type that is not supported.
    """
    try:
        hf_config = read_hf_config(model_dir)
        overrides = nested_overrides(hf_config, families.engine_overrides(hf_config))
        # Engines receive weights in the format of rollout.quantization, even if the checkpoint is quantised.
        if load_weights:
            return overrides
        return overrides | {"quantization_config": _quantised(hf_config, quantization, group)}
    except ConversionError as error:
        raise ConfigError(f"{key}: {error}") from error


def optional_imports(model_dir: str | Path) -> tuple[str, tuple[str, ...]]:
    """Return the architecture of a model, and the optional packages that vLLM's class for it imports.

    Raises: ConversionError for a model_type that is not supported.
    """
    family = families.family_for(read_hf_config(model_dir))
    return family.architecture, family.vllm_imports


def has_vision_tower(model_dir: str | Path) -> bool:
    """Return whether the engine loads the model with its vision tower.

    Raises: ConversionError for a directory without a config.json.
    """
    return "vision_config" in read_hf_config(model_dir)


def _quantised(hf_config: HFConfig, quantization: str, group: int) -> dict[str, object] | None:
    if quantization == UNQUANTIZED:
        return None
    rows = families.family_for(hf_config).rows(hf_config)
    if quantization == INT4:
        return _int4_fields(rows, group)
    return quantised_fields(bind(rows, hf_config, torch.bfloat16))


def _int4_fields(rows: Iterable[Row], group: int) -> dict[str, object]:
    """Return quantization_config for engines that receive the experts' weights as INT4 words and scales.

    Source: compressed-tensors 0.17, QuantizationConfig with format pack-quantized.
    """
    # One pattern per row: a model has thousands of experts.
    modules = {name.removesuffix(".weight") for row in rows if row_quantization(row, INT4) == INT4 for name in row.hf}
    patterns = [re.sub(r"\\{[le]\\}", r"\\d+", re.escape(module)) for module in modules]
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
    }
    scheme = {"targets": sorted(f"re:{pattern}$" for pattern in patterns), "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"experts": scheme},
        "ignore": [],
    }
