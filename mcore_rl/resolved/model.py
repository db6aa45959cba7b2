"""Model of a run and its parallel layout, for `plan`, for the checks before launch, and for the ranks. Does not import
megatron.core, so that the driver can use it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_rl.config.algorithm import AlgorithmConfig, is_supervised
from mcore_rl.config.roles import POLICY, EngineRole, ModelRole
from mcore_rl.config.rules.validation import read_hf_config
from mcore_rl.config.schema import ModelConfig
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.implementation import Implementation, build_request, choose
from mcore_rl.resolved.layout import check_experts, conversion_errors, model_arguments, train_layout
from mcore_rl.resolved.recompute import recompute_arguments
from model_converters.families import check_for_engine, engine_overrides, family_for, missing_engine_fields
from model_converters.families.parts.family import ModelArguments
from model_converters.families.parts.hf_config import HFConfig
from model_converters.families.parts.mtp import num_mtp_layers, without_mtp
from model_converters.hf.value_head import value_model_config
from model_converters.mapping.layout import TrainLayout

if TYPE_CHECKING:
    from mcore_rl.resolved.installed import Installed


@dataclass(frozen=True)
class ResolvedModel:
    """Model and layout. `hf_config` is config.json without layers that are not built, `arguments` are the sizes and
    settings that the model family derives from it. `left_out`: number of multi-token-prediction layers in config.json
    that are not built."""

    hf_config: dict[str, Any]
    arguments: ModelArguments
    layout: TrainLayout
    left_out: int = 0

    @classmethod
    def policy(cls, role: ModelRole, num_ranks: int) -> ResolvedModel:
        """Resolve the policy on `num_ranks` ranks.

        Raises: ConfigError.
        """
        hf_config, left_out = policy_config(role)
        return _spec(role, hf_config, num_ranks, left_out)

    @classmethod
    def value_model(cls, role: ModelRole, num_ranks: int) -> ResolvedModel:
        """Resolve a critic or a reward model.

        Raises: ConfigError.
        """
        return _spec(role, value_config(role), num_ranks, left_out=0)

    def implementation(self, role: ModelRole, gpus_per_node: int, installed: Installed) -> Implementation:
        """Choose the components that the model is built from, on a machine with `installed`.

        Raises: ConfigError for an explicitly requested setting that is not available, including recomputation.
        """
        request = build_request(role.section, role.model, self.layout, self.arguments, gpus_per_node, role)
        chosen = choose(installed, request)
        # Only for its errors: the ranks compute the arguments again.
        recompute_arguments(role.section, self.arguments, self.layout, chosen, role)
        return chosen


def policy_config(role: ModelRole) -> tuple[dict[str, object], int]:
    """Return config.json of the policy, and the number of multi-token-prediction layers that were removed from it. They
    are removed unless they have a loss.

    Raises: ConfigError for an unreadable file, an unknown family, or a loss for missing layers.
    """
    coefficient = role.section.mtp_loss_coefficient
    path = f"{role.checkpoint}={role.model.hf_path}"
    hf_config = read_hf_config(role.model, role.checkpoint)
    with conversion_errors(f"{path}: "):
        # Only for its error: num_mtp_layers accepts unknown families.
        family_for(hf_config)
        layers = num_mtp_layers(hf_config)
    # Without a loss, the layers would only cost memory: generation and the main loss do not use them.
    if not coefficient:
        return without_mtp(hf_config), layers
    if not layers:
        key = role.key("mtp_loss_coefficient")
        raise ConfigError(
            f"{key}={coefficient}, but {path} has no multi-token-prediction layers (num_nextn_predict_layers); set "
            f"{key} to 0"
        )
    return hf_config, 0


def value_config(role: ModelRole) -> dict[str, object]:
    """Return config.json of a value model.

    Raises: ConfigError for a file that cannot be read, or an unknown family.
    """
    hf_config = read_hf_config(role.model, role.checkpoint)
    with conversion_errors(f"{role.checkpoint}={role.model.hf_path}: "):
        # Only for its error: value_model_config accepts unknown families.
        family_for(hf_config)
        return value_model_config(hf_config)


def check_engine_model(role: EngineRole, algorithm: AlgorithmConfig, hf_config: HFConfig) -> None:
    """Reject a config.json from which the engine builds a different model than transformers and the trainer. A
    supervised run has no engine, so every config.json passes.

    Raises: ConfigError naming the field.
    """
    if not is_supervised(algorithm):
        with conversion_errors(f"{role.checkpoint}={role.model.hf_path}: "):
            check_for_engine(hf_config, role.section.engine)


def overridden_fields(model: ModelConfig, hf_config: HFConfig) -> list[str]:
    """Return a note for the log if engines get values that differ from config.json; [] otherwise."""
    missing = missing_engine_fields(hf_config)
    changed = {key: value for key, value in engine_overrides(hf_config).items() if key not in missing}
    if not changed:
        return []
    values = ", ".join(f"{key}={json.dumps(value)}" for key, value in changed.items())
    note = (
        f"{POLICY.checkpoint}={model.hf_path}: transformers' {hf_config['model_type']} does not use the "
        f"values of some fields of config.json, so the engines of this run get {values}; exports keep the values: "
        "correct config.json before an export is served"
    )
    return [note]


def _spec(role: ModelRole, hf_config: dict[str, object], num_ranks: int, left_out: int) -> ResolvedModel:
    arguments = model_arguments(hf_config, role.checkpoint)
    layout = train_layout(role.section.parallel, num_ranks, hf_config, role)
    check_experts(role.section.moe, arguments.transformer, role)
    return ResolvedModel(hf_config, arguments, layout, left_out)
