"""A model of a run in its layout, settled once: what `plan` counts, preparation refuses and the ranks build. Imports no
megatron.core, so the driver can ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mcore_rl.config import num_trainer_ranks, read_hf_config
from mcore_rl.config.names import role_key
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.implementation import Implementation, choose, wanted
from mcore_rl.resolved.layout import check_experts, model_arguments, train_layout
from mcore_rl.resolved.recompute import recompute_arguments
from model_converters.errors import ConversionError
from model_converters.families import ModelArguments, family_for
from model_converters.families.parts.mtp import num_mtp_layers, without_mtp
from model_converters.hf.value_head import value_model_config
from model_converters.mapping.layout import TrainLayout

if TYPE_CHECKING:
    from mcore_rl.config.schema import Config
    from mcore_rl.resolved.installed import Installed


@dataclass(frozen=True)
class ModelSpec:
    """`hf_config` is config.json as the model is trained, `arguments` what its family says of it. `left_out` are the
    multi-token-prediction layers that config.json has and the trained model has not."""

    hf_config: dict[str, Any]
    arguments: ModelArguments
    layout: TrainLayout
    left_out: int = 0

    @classmethod
    def policy(cls, config: Config, num_ranks: int | None = None) -> ModelSpec:
        """The actor's; `num_ranks` as num_trainer_ranks unless given.

        Raises: ConfigError.
        """
        hf_config, left_out = policy_config(config)
        return _spec(config, hf_config, num_ranks or num_trainer_ranks(config), left_out)

    @classmethod
    def value_model(cls, view: Config, num_ranks: int) -> ModelSpec:
        """Of a critic or a reward model, in the configuration that has it in the actor's place (`as_actor`).

        Raises: ConfigError.
        """
        return _spec(view, value_config(view), num_ranks, left_out=0)

    def implementation(self, config: Config, installed: Installed) -> Implementation:
        """What it is built from, where this is installed.

        Raises: ConfigError for what is asked for by name and cannot be had, recomputation included.
        """
        nodes = config.cluster.gpus_per_node
        chosen = choose(installed, wanted(config.actor, config.model, self.layout, self.arguments, nodes))
        recompute_arguments(config.actor, self.arguments, self.layout, chosen)
        return chosen


def policy_config(config: Config) -> tuple[dict[str, Any], int]:
    """config.json as the policy is trained: multi-token-prediction layers are in it only when they have a loss; and how
    many were left out.

    Raises: ConfigError for one that cannot be read, of no known family, or without the layers that were asked for.
    """
    directory, coefficient = config.model.hf_path, config.actor.mtp_loss_coefficient
    hf_config = read_hf_config(config)
    try:
        family_for(hf_config)
        layers = num_mtp_layers(hf_config)
    except ConversionError as error:
        raise ConfigError(f"{role_key('model.hf_path')}={directory}: {error}") from error
    if not coefficient:
        return without_mtp(hf_config), layers
    if not layers:
        key = role_key("actor.mtp_loss_coefficient")
        raise ConfigError(
            f"{key}={coefficient}, but {role_key('model.hf_path')}={directory} has no multi-token-prediction layers "
            f"(num_nextn_predict_layers); set {key} to 0"
        )
    return hf_config, 0


def value_config(view: Config) -> dict[str, Any]:
    """config.json of the value model at model.hf_path.

    Raises: ConfigError for one that cannot be read, or of no known family.
    """
    hf_config = read_hf_config(view)
    try:
        family_for(hf_config)
        return value_model_config(hf_config)
    except ConversionError as error:
        raise ConfigError(f"{role_key('model.hf_path')}={view.model.hf_path}: {error}") from error


def _spec(config: Config, hf_config: dict[str, Any], num_ranks: int, left_out: int) -> ModelSpec:
    arguments = model_arguments(hf_config)
    layout = train_layout(config.actor.parallel, num_ranks, hf_config)
    check_experts(config.actor.moe, arguments.transformer)
    return ModelSpec(hf_config, arguments, layout, left_out)
