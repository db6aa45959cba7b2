"""Model of a run and its parallel layout, for `plan`, for the checks before launch, and for the ranks. Does not import
megatron.core, so that the driver can use it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mcore_rl.config.algorithm import AlgorithmConfig, is_supervised
from mcore_rl.config.models import ModelConfig
from mcore_rl.config.roles import POLICY, EngineRole, ModelRole
from mcore_rl.config.rules.objective import trains_scores
from mcore_rl.config.rules.validation import read_hf_config
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.implementation import BuildRequest, Implementation, choose
from mcore_rl.resolved.layout import check_experts, conversion_errors, model_arguments, role_layout
from mcore_rl.resolved.quantization import check_blocks, check_trained_groups
from mcore_rl.resolved.recompute import recompute_arguments
from mcore_rl.resolved.vision import check_vision
from model_converters.errors import ConversionError
from model_converters.families import check_for_engine, engine_overrides, family_for, missing_engine_fields
from model_converters.families.parts.arguments import ModelArguments
from model_converters.families.parts.hf_config import HFConfig
from model_converters.families.parts.mtp import num_mtp_layers, without_mtp
from model_converters.hf.value_head import value_model_config
from model_converters.mapping.layout import TrainLayout
from model_converters.vision_model import VISION_TYPES, flat_fields

if TYPE_CHECKING:
    from mcore_rl.resolved.installed import Installed


@dataclass(frozen=True)
class ResolvedModel:
    """A model of the run in its layout. `hf_config` is config.json without layers that are not built; `left_out` of its
    multi-token-prediction layers are not built."""

    role: ModelRole
    hf_config: dict[str, Any]
    layout: TrainLayout
    left_out: int = 0

    @classmethod
    def policy(cls, role: ModelRole, num_ranks: int) -> ResolvedModel:
        """Resolve the policy on `num_ranks` ranks.

        Raises: ConfigError.
        """
        return cls._checked(role, num_ranks, *policy_config(role))

    @classmethod
    def value_model(cls, role: ModelRole, num_ranks: int) -> ResolvedModel:
        """Resolve a critic or a reward model.

        Raises: ConfigError.
        """
        hf_config = read_hf_config(role.model, role.checkpoint)
        with conversion_errors(f"{role.checkpoint}={role.model.hf_path}: "):
            # Only for its error: value_model_config accepts unknown families.
            hf_config = flat_fields(hf_config)
            family_for(hf_config)
            hf_config = value_model_config(hf_config)
            if hf_config["model_type"] in VISION_TYPES:
                raise ConversionError(
                    f"model_type {hf_config['model_type']!r} has a vision tower, which critics and reward models do "
                    "not support; use a text model"
                )
        return cls._checked(role, num_ranks, hf_config)

    @classmethod
    def _checked(cls, role: ModelRole, num_ranks: int, hf_config: dict[str, Any], left_out: int = 0) -> ResolvedModel:
        spec = cls(role, hf_config, role_layout(role, num_ranks, hf_config), left_out)
        check_experts(role.section.moe, spec.arguments.transformer, role)
        check_vision(role, spec.arguments, spec.layout)
        return spec

    @cached_property
    def arguments(self) -> ModelArguments:
        """Sizes and settings that the model family derives from `hf_config`."""
        return model_arguments(self.hf_config, self.role.checkpoint)

    def implementation(self, gpus_per_node: int | None, installed: Installed) -> Implementation:
        """Choose the components that the model is built from, on a machine with `installed`. Without gpus_per_node, all
        ranks count as being on one node.

        Raises: ConfigError for an explicitly requested setting that is not available, including recomputation.
        """
        sizes, factor = self.arguments.transformer, self.arguments.rotary.factor
        chosen = choose(installed, BuildRequest(self.role, sizes, self.layout, gpus_per_node, factor))
        # Only for its errors: build_model computes the arguments again.
        recompute_arguments(self, chosen)
        return chosen


def trained_model(config: Config) -> ResolvedModel:
    """Resolve the model of the actor: the policy, or with trainer.objective=reward_model a value model.

    Raises: ConfigError.
    """
    role = ModelRole.policy(config.actor, config.model)
    resolve = ResolvedModel.value_model if trains_scores(config) else ResolvedModel.policy
    return resolve(role, config.num_trainer_ranks)


def policy_config(role: ModelRole) -> tuple[dict[str, object], int]:
    """Return config.json of the policy, and the number of multi-token-prediction layers that were removed from it. They
    are removed unless they have a loss.

    Raises: ConfigError for an unreadable file, an unknown family, or a loss for missing layers.
    """
    coefficient = role.section.mtp_loss_coefficient
    path = f"{role.checkpoint}={role.model.hf_path}"
    hf_config = read_hf_config(role.model, role.checkpoint)
    with conversion_errors(f"{path}: "):
        hf_config = flat_fields(hf_config)
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


def check_policy_engines(engines: EngineRole, algorithm: AlgorithmConfig, spec: ResolvedModel) -> None:
    """Check the policy's engines: check_engine_model, whether updates can contain their weights, and the layout of the
    trainer beside rollout.quantization.

    Raises: ConfigError naming the field, matrix or key.
    """
    check_engine_model(engines, algorithm, spec.hf_config)
    if not is_supervised(algorithm):
        _check_expert_biases(engines, spec.hf_config)
        check_trained_groups(engines, spec.role, spec.hf_config, spec.layout.etp)


def _check_expert_biases(engines: EngineRole, hf_config: HFConfig) -> None:
    """Reject engine ranks that divide every expert if the experts have biases: vLLM adds the bias of the second
    projection on the first rank only, and the others hold zeros, which no update contains."""
    rows = family_for(hf_config).rows(hf_config)
    biased = any(row.num_experts and len(row.shapes[0]) == 1 for row in rows)
    if biased and engines.section.tp > 1 and not engines.section.expert_parallel:
        raise ConfigError(
            f"{engines.key('tp')}={engines.section.tp}: the experts of {hf_config['model_type']} have biases, and "
            f"slices of such experts cannot be sent to engines; set {engines.key('expert_parallel')}=true, or "
            f"{engines.key('tp')}=1"
        )


def check_engine_model(role: EngineRole, algorithm: AlgorithmConfig, hf_config: HFConfig) -> None:
    """Reject a config.json from which the engine builds a different model than transformers and the trainer, or that it
    cannot divide into the blocks of rollout.quantization. A supervised run has no engine, so every config.json passes.

    Raises: ConfigError naming the field or matrix.
    """
    if not is_supervised(algorithm):
        with conversion_errors(f"{role.checkpoint}={role.model.hf_path}: "):
            check_for_engine(hf_config, role.section.engine)
        check_blocks(role, hf_config)


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
