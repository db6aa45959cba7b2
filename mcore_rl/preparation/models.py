"""What can be refused of the models of a run before they are built; of weights the headers are read."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from mcore_rl.algorithms import Needs
from mcore_rl.config import (
    Config,
    num_critic_ranks,
    num_reward_model_ranks,
    read_hf_config,
    validate_critic,
)
from mcore_rl.config.rules.judge import as_policy, named_as_judge, template_text, uses_judge
from mcore_rl.config.rules.roles import as_actor, named_as
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.judge.prompts import JudgePrompts, check_room
from mcore_rl.rewards.judge.scores import score_reader
from mcore_rl.spec.adapters import bound_adapters, check_adapter, check_peft_names
from mcore_rl.spec.implementation import choose, wanted
from mcore_rl.spec.installed import look
from mcore_rl.spec.layout import check_experts, model_arguments, train_layout
from mcore_rl.spec.recompute import recompute_arguments
from model_converters.errors import ConversionError
from model_converters.families.parts.mtp import num_mtp_layers, settle_mtp, without_mtp
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.value_head import settle_value_head, value_model_config
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.table import bind


def trained_model(config: Config) -> dict[str, Any]:
    """config.json without the multi-token-prediction layers that are not trained."""
    hf_config = read_hf_config(config)
    try:
        return hf_config if config.actor.mtp_loss_coefficient else without_mtp(hf_config)
    except ConversionError as error:
        raise ConfigError(f"model.hf_path={config.model.hf_path}: {error}") from error


def check_implementation(config: Config, hf_config: dict[str, Any], layout: TrainLayout) -> None:
    """What trainer ranks could not be built from; they run on this machine or on one with the same packages."""
    device, arguments = config.cluster.device, model_arguments(hf_config)
    installed = look(cuda=torch.cuda.is_available() if device == "auto" else device == "cuda")
    wishes = wanted(config.actor, config.model, layout, arguments, config.cluster.gpus_per_node)
    recompute_arguments(config.actor, arguments, layout, choose(installed, wishes))


def critic_layout(config: Config, actor: TrainLayout) -> TrainLayout:
    """What can be refused of a critic before it is built."""
    validate_critic(config)
    with named_as("critic", config.critic):
        view = as_actor(config, config.critic)
        hf_config = without_mtp(read_hf_config(view))
        layout = train_layout(view.actor.parallel, num_critic_ranks(config), hf_config)
        check_experts(view.actor.moe, model_arguments(hf_config).transformer)
        check_implementation(view, hf_config, layout)
    if actor.dp % layout.dp and layout.dp % actor.dp:
        raise ConfigError(
            f"critic.parallel: {layout.dp} data-parallel ranks of the critic beside {actor.dp} of the policy; one "
            "number must divide the other: change critic.num_ranks or critic.parallel"
        )
    return layout


def reward_model_layout(config: Config, needs: Needs) -> TrainLayout:
    """What can be refused of a reward model before it is built; of its weights the headers are read."""
    section = config.reward_model
    if not needs.advantages:
        raise ConfigError(
            f"reward_model.hf_path={section.hf_path} has no effect: algorithm.policy_loss.name="
            f"{config.algorithm.policy_loss.name} is supervised; set it to null"
        )
    with named_as("reward_model", section):
        view = as_actor(config, section)
        hf_config = without_mtp(read_hf_config(view))
        layout = train_layout(section.parallel, num_reward_model_ranks(config), hf_config)
        check_experts(section.moe, model_arguments(hf_config).transformer)
        check_implementation(view, hf_config, layout)
        try:
            with HFCheckpoint(view.model.hf_path) as checkpoint:
                rows, dropped = settle_value_head(checkpoint, required=True)
                bound = bind(rows, value_model_config(checkpoint.config), torch.float32)
                check_complete(bound, checkpoint.shapes, dropped=dropped)
        except ConversionError as error:
            raise ConfigError(
                f"model.hf_path={view.model.hf_path}: {' '.join(str(error).split())}; set model.hf_path to a sequence "
                "classification checkpoint with one label"
            ) from None
    return layout


def check_weights(config: Config) -> int:
    """Number of parameters in the HF directory (0 with random_init). Reads headers only; every tensor that the model
    needs must be there, whole, and none besides."""
    key, keep = "actor.mtp_loss_coefficient", config.actor.mtp_loss_coefficient > 0
    none = f"{key}={config.actor.mtp_loss_coefficient}, but there are no multi-token-prediction layers; set {key} to 0"
    try:
        if config.model.random_init:
            if keep and not num_mtp_layers(read_hf_config(config)):
                raise ConversionError(none)
            return 0
        with HFCheckpoint(config.model.hf_path) as checkpoint:
            hf_config, dropped = settle_mtp(checkpoint.config, checkpoint.shapes, keep=keep)
            if keep and not num_mtp_layers(hf_config):
                raise ConversionError(none)
            bound = bind(checkpoint.family.rows(hf_config), hf_config, torch.float32)
            check_complete(bound, checkpoint.shapes, dropped=dropped)
            return sum(math.prod(shape) for name, shape in checkpoint.shapes.items() if name not in set(dropped))
    except ConversionError as error:
        raise ConfigError(f"model.hf_path={config.model.hf_path}: {' '.join(str(error).split())}") from None


def check_adapters(config: Config, hf_config: dict[str, Any]) -> int:
    """Number of parameters of the adapters, and whether those to start from fit."""
    lora = config.actor.lora
    bound = bound_adapters(lora, hf_config, torch.float32)
    if lora.path is not None:
        check_adapter(lora, hf_config)
    if config.trainer.export_adapter is not None:
        check_peft_names(lora, hf_config)
    return sum(math.prod(shape) for row in bound for shape in row.row.shapes)


def check_reference(config: Config, hf_config: dict[str, Any], needs: Needs) -> None:
    """What can be refused of a reference before it is built."""
    if not needs.advantages:
        raise ConfigError(
            f"algorithm.policy_loss.name={config.algorithm.policy_loss.name} is supervised and has no reference; set "
            "algorithm.kl.in_loss and algorithm.kl.in_reward to 0"
        )
    path = config.reference.hf_path
    if path is None:
        return
    view = replace(config, model=replace(config.model, hf_path=path, random_init=False))
    try:
        same = model_arguments(trained_model(view)) == model_arguments(hf_config)
        if same:
            check_weights(view)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.hf_path", "reference.hf_path")) from error
    if not same:
        raise ConfigError(
            f"reference.hf_path={path} is of another architecture than model.hf_path={config.model.hf_path}; set it to "
            "a checkpoint of the same model, or to null"
        )


def check_judge(config: Config, needs: Needs, prompts: dict[str, PromptSet]) -> None:
    """What can be refused of a judge, if there is one, before its engines start."""
    if not uses_judge(config):
        return
    if not needs.advantages:
        raise ConfigError(
            f"judge.hf_path={config.judge.hf_path} has nothing to read: algorithm.policy_loss.name="
            f"{config.algorithm.policy_loss.name} samples no responses; set it to null"
        )
    score_reader(config.judge)
    with named_as_judge():
        view = as_policy(config)
        check_weights(view)
        tokenizer = load_tokenizer(view.model.tokenizer_path or view.model.hf_path)
    check_room(JudgePrompts(tokenizer, template_text(config.judge)), prompts, config.judge.max_prompt_tokens)
