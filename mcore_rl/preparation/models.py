"""Checks of the models of a run before they are built.

Only the headers of weight files are read, and those tensors that are stored twice and must be equal.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path

import torch

from mcore_rl.algorithms import Needs
from mcore_rl.config import Config
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.models import LoraConfig, ModelConfig, ReferenceConfig
from mcore_rl.config.reward import JudgeConfig
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.judge import has_judge_engines, server_key, template_text, uses_judge
from mcore_rl.config.rules.validation import check_positions, validate_critic
from mcore_rl.config.schema import ClusterConfig, RolloutConfig
from mcore_rl.data.chat.limits import check_limits
from mcore_rl.data.prompts import PromptSet
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.adapters import bound_adapters, check_adapter, check_peft_names
from mcore_rl.resolved.installed import look
from mcore_rl.resolved.layout import conversion_errors, model_arguments
from mcore_rl.resolved.model import ResolvedModel, check_engine_model, policy_config
from mcore_rl.rewards.judge.prompts import JudgePrompts, check_room
from mcore_rl.rewards.judge.scores import score_reader
from mcore_rl.rewards.judge.server import try_server
from model_converters.errors import ConversionError
from model_converters.families.parts.hf_config import HFConfig
from model_converters.families.parts.mtp import num_mtp_layers, resolve_copies, resolve_mtp
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.loader import check_copies
from model_converters.hf.side_files import side_files
from model_converters.hf.value_head import resolve_value_head, value_model_config
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.table import bind

logger = logging.getLogger(__name__)


def check_implementation(cluster: ClusterConfig, spec: ResolvedModel) -> None:
    """Reject a model that Megatron ranks cannot build with the packages of this machine.

    The other hosts of a run are assumed to have the same packages.
    """
    spec.implementation(cluster.gpus_per_node, look(cuda=cluster.uses_cuda))


def critic_layout(config: Config, actor: TrainLayout) -> TrainLayout:
    """Check the critic and return its layout. `actor` is the layout of the policy."""
    validate_critic(config)
    role = ModelRole.critic(config.critic, config.model)
    spec = ResolvedModel.value_model(role, role.section.num_ranks or config.num_trainer_ranks)
    check_implementation(config.cluster, spec)
    check_positions(EngineRole.rollout(config.rollout, config.model), spec.hf_config, f"{role.checkpoint}'s")
    layout = spec.layout
    # Ranks of one model fetch only from the ranks of the other whose responses overlap theirs (types.TokenRefs).
    if actor.dp % layout.dp and layout.dp % actor.dp:
        raise ConfigError(
            f"critic.parallel: {layout.dp} data-parallel ranks of the critic beside {actor.dp} of the policy; one "
            "number must divide the other: change critic.num_ranks or critic.parallel"
        )
    return layout


def reward_model_layout(
    role: ModelRole, cluster: ClusterConfig, num_ranks: int, loss: str, needs: Needs
) -> TrainLayout:
    """Check the reward model and the headers of its weights, and return its layout. `loss` is the policy loss."""
    if not needs.advantages:
        raise ConfigError(
            f"reward_model.hf_path={role.model.hf_path} has no effect: algorithm.policy_loss.name={loss} is "
            "supervised; set it to null"
        )
    spec = ResolvedModel.value_model(role, num_ranks)
    check_implementation(cluster, spec)
    remedy = f"; set {role.checkpoint} to a sequence classification checkpoint with one label"
    check_value_weights(role, remedy, needs_head=True)
    return spec.layout


def check_value_weights(role: ModelRole, remedy: str = "", *, needs_head: bool = False) -> int:
    """Check the HF directory of a value model like check_weights. Without needs_head it may be a causal model.

    `remedy` ends the errors.
    """
    directory = role.model.hf_path
    with conversion_errors(f"{role.checkpoint}={directory}: ", remedy):
        side_files(Path(directory))
        if role.model.random_init and not needs_head:
            return 0
        with HFCheckpoint(directory) as checkpoint:
            rows, dropped = resolve_value_head(checkpoint, required=needs_head)
            # Only names and shapes are compared, so the dtype does not matter.
            bound = bind(rows, value_model_config(checkpoint.config), torch.float32)
            check_complete(bound, checkpoint.shapes, dropped=dropped)
            checkpoint.unlisted.check_copies()
            return sum(math.prod(checkpoint.shapes[name]) for name in checkpoint.shapes.keys() - set(dropped))


def check_weights(role: ModelRole) -> int:
    """Check the model's HF directory and return the number of parameters in it, or 0 with random_init.

    Raises ConfigError unless the directory contains exactly the tensors of the model, none of them truncated. Reads
    headers, and tensors that are stored twice.
    """
    key, coefficient = role.key("mtp_loss_coefficient"), role.section.mtp_loss_coefficient
    directory, keep = role.model.hf_path, coefficient > 0
    with conversion_errors(f"{role.checkpoint}={directory}: "):
        # Also with random weights, since an export copies these files.
        side_files(Path(directory))
        if role.model.random_init:
            return 0
        with HFCheckpoint(directory) as checkpoint:
            hf_config, dropped = resolve_mtp(checkpoint.config, checkpoint.shapes, keep=keep)
            if keep and not num_mtp_layers(hf_config):
                raise ConversionError(
                    f"{key}={coefficient}, but there are no multi-token-prediction layers; set {key} to 0"
                )
            bound, _ = resolve_copies(
                bind(checkpoint.family.rows(hf_config), hf_config, torch.float32), checkpoint.shapes
            )
            check_complete(bound, checkpoint.shapes, dropped=dropped)
            check_copies(checkpoint, bound)
            for note in checkpoint.unlisted.notes:
                logger.warning("%s=%s: %s", role.checkpoint, directory, note)
            # Layers that are not built do not count.
            return sum(math.prod(checkpoint.shapes[name]) for name in checkpoint.shapes.keys() - set(dropped))


def check_adapters(lora: LoraConfig, hf_config: HFConfig, *, exports: bool) -> int:
    """Check the LoRA adapters and return the number of their parameters.

    Adapters in lora.path must fit the model. With `exports`, PEFT must have names for all adapters.
    """
    bound = bound_adapters(lora, hf_config, torch.float32)
    if lora.path is not None:
        check_adapter(lora, hf_config)
    if exports:
        check_peft_names(lora, hf_config)
    return sum(math.prod(shape) for row in bound for shape in row.row.shapes)


def check_reference(
    reference: ReferenceConfig, policy: ModelRole, loss: str, hf_config: HFConfig, needs: Needs
) -> None:
    """Check the reference of a KL term before it is built. `hf_config` is the policy's, and `loss` the policy loss."""
    if not (needs.advantages or needs.pairs):
        raise ConfigError(
            f"algorithm.policy_loss.name={loss} is supervised and has no reference; set algorithm.kl.in_loss and "
            "algorithm.kl.in_reward to 0"
        )
    if reference.hf_path is None:
        return
    role = ModelRole.reference(reference, policy.section, policy.model)
    if model_arguments(policy_config(role)[0], role.checkpoint) != model_arguments(hf_config):
        raise ConfigError(
            f"reference.hf_path={reference.hf_path} has another architecture than model.hf_path="
            f"{policy.model.hf_path}; set it to a checkpoint of the same model, or to null"
        )
    check_weights(role)


def check_judge(
    judge: JudgeConfig,
    rollout: RolloutConfig,
    model: ModelConfig,
    algorithm: AlgorithmConfig,
    prompts: dict[str, PromptSet],
) -> None:
    """Check the judge, if the run has one, before its engines start. Supervised runs have no `prompts`."""
    if not uses_judge(judge):
        return
    if not prompts:
        raise ConfigError(
            f"{'judge.hf_path' if has_judge_engines(judge) else 'judge.url'} names a judge, but "
            f"algorithm.policy_loss.name={algorithm.policy_loss.name} samples no responses; set it to null"
        )
    score_reader(judge)
    if has_judge_engines(judge):
        engines = EngineRole.judge(judge, rollout, model)
        hf_config, _ = policy_config(ModelRole.on_engines(engines))
        check_engine_model(engines, algorithm, hf_config)
        check_weights(ModelRole.on_engines(engines))
    if (path := judge.tokenizer_path or judge.hf_path) is not None:
        key = "judge.tokenizer_path"
        tokenizer = load_tokenizer(path, key)
        questions = partial(JudgePrompts, tokenizer, template_text(judge))
        check_limits(questions, key, "")
        check_room(questions(), prompts, judge.max_prompt_tokens)
    if judge.url is not None:
        try_server(judge, server_key(judge))
