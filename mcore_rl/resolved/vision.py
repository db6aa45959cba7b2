"""Checks of models with a vision tower."""

from __future__ import annotations

from mcore_rl.config.models import FSDP2
from mcore_rl.config.roles import ModelRole
from mcore_rl.errors import ConfigError
from model_converters.families.parts.family import ModelArguments
from model_converters.mapping.layout import TrainLayout


def check_vision(role: ModelRole, arguments: ModelArguments, layout: TrainLayout) -> None:
    """Reject settings that a vision tower does not support, and a trained tower of a model without one.

    Raises: ConfigError naming the key.
    """
    section = role.section
    trained = f"{role.key('train_vision')}=true"
    if arguments.vision is None:
        if section.train_vision:
            raise ConfigError(f"{trained}: {role.checkpoint}={role.model.hf_path} has no vision tower; set it to false")
        return
    tower = f"the vision tower of {role.checkpoint}={role.model.hf_path}"
    if section.strategy == FSDP2:
        raise ConfigError(f"{role.key('strategy')}={FSDP2} is not supported with {tower}; set it to megatron")
    if section.parallel.shard_parameters:
        raise ConfigError(
            f"{role.key('parallel.shard_parameters')}=true is not supported with {tower}; set it to false"
        )
    if section.fp8 != "none":
        raise ConfigError(f"{role.key('fp8')}={section.fp8} is not supported with {tower}; set it to none")
    if section.mtp_loss_coefficient:
        raise ConfigError(
            f"{role.key('mtp_loss_coefficient')}={section.mtp_loss_coefficient} is not supported with {tower}: the "
            "layers predict from embeddings of placeholder tokens; set it to 0"
        )
    if section.train_vision and section.overlap_grad_reduce:
        raise ConfigError(
            f"{role.key('overlap_grad_reduce')}=true is not supported with {trained}: the tower has no gradients in a "
            "micro-batch without images; set one of the two to false"
        )
    _check_deepstack(role, arguments, layout)


def _check_deepstack(role: ModelRole, arguments: ModelArguments, layout: TrainLayout) -> None:
    """Raise ConfigError if the first model chunk has fewer layers than the tower has deepstack features."""
    assert arguments.vision is not None
    stages = layout.stage_layers(arguments.transformer["num_layers"])
    first, needed = len(stages[0][0]), arguments.vision.deepstack
    if first < needed:
        kind = "pipeline stage" if layout.vpp is None else "virtual pipeline stage"
        raise ConfigError(
            f"{role.key('parallel.pp')}={layout.pp}: the first {kind} has {first} layers, but the vision tower adds "
            f"features behind the first {needed} layers; use fewer stages, or set "
            f"{role.key('parallel.first_stage_layers')} to at least {needed}"
        )
