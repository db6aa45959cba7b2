"""Everything that can be refused before a process starts, after `preflight`, and the inputs that passed. Only verbs
and assembly use it."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mcore_rl.algorithms import Estimator, Needs, advantage_options, estimator
from mcore_rl.algorithms.aggregation import check_mode
from mcore_rl.config import (
    Config,
    num_critic_ranks,
    num_reward_model_ranks,
    num_trainer_ranks,
    read_hf_config,
    validate_critic,
)
from mcore_rl.config.earlier import replace_config
from mcore_rl.config.judge import as_policy, named_as_judge, template_text, uses_judge
from mcore_rl.config.lora import uses_lora
from mcore_rl.config.reference import uses_reference
from mcore_rl.config.reward_model import uses_reward_model
from mcore_rl.config.roles import as_actor, named_as
from mcore_rl.data.columns import check_keys
from mcore_rl.data.packing import SequenceCost
from mcore_rl.data.prompts import LoadReport, PromptSet, load_prompts
from mcore_rl.data.supervised import SupervisedSet, load_supervised
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.costs import sequence_cost
from mcore_rl.megatron.implementation import choose, wanted
from mcore_rl.megatron.installed import look
from mcore_rl.megatron.layout import check_experts, model_arguments, train_layout
from mcore_rl.megatron.lora.table import bound_adapters, check_adapter, check_peft_names
from mcore_rl.megatron.objective import Objective
from mcore_rl.megatron.recompute import recompute_arguments
from mcore_rl.rewards.functions import check_reward_function
from mcore_rl.rewards.trial import try_reward_function
from mcore_rl.rollout.judge_prompts import JudgePrompts, check_room
from mcore_rl.rollout.judge_scores import score_reader
from mcore_rl.rollout.reward_inputs import RewardInputs
from mcore_rl.trainer.batches import response_filter
from model_converters.completeness import check_complete
from model_converters.errors import ConversionError
from model_converters.io import HFCheckpoint
from model_converters.layout import TrainLayout
from model_converters.mtp import num_mtp_layers, settle_mtp, without_mtp
from model_converters.table import bind
from model_converters.value_head import settle_value_head, value_model_config

# Of a checkpoint: a parameter, the float32 main copy of a bfloat16 one, and two float32 Adam moments.
CHECKPOINT_BYTES_PER_PARAMETER = {"float32": 12, "bfloat16": 14}


@dataclass(frozen=True)
class Prepared:
    """Checked inputs of a run: `prompts` for reinforcement learning, or `targets` for supervised training."""

    layout: TrainLayout
    cost: SequenceCost
    prompts: dict[str, PromptSet]
    targets: SupervisedSet | None
    reports: tuple[LoadReport | str, ...]
    checkpoint_bytes: int
    estimator: Estimator
    critic: TrainLayout | None = None
    """Of the critic, where the estimator needs one."""
    reward_model: TrainLayout | None = None
    """Of the reward model, where responses are scored by one."""


def prepare(config: Config) -> Prepared:
    """Checks what `preflight.check_run` had to leave, and loads the data; writes nothing.

    Raises: ConfigError, DataError for the first thing that cannot work.
    """
    hf_config = _trained_model(config)
    layout = train_layout(config.actor.parallel, num_trainer_ranks(config), hf_config)
    check_experts(config.actor.moe, model_arguments(hf_config).transformer)
    _check_implementation(config, hf_config, layout)
    parameters = _check_weights(config)
    own = _check_adapters(config, hf_config) if uses_lora(config.actor) else parameters
    chosen, needs = _check_algorithm(config)
    critic = None
    if needs.advantages and chosen.needs.critic:
        critic = _critic_layout(config, layout)
    if uses_reference(config):
        _check_reference(config, hf_config, needs)
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_path)
    reward_model = _reward_model_layout(config, needs) if uses_reward_model(config) else None
    prompts: dict[str, PromptSet] = {}
    targets: SupervisedSet | None = None
    reports: list[LoadReport | str] = []
    if needs.advantages:
        check_reward_function(config.reward)
        paths = {"train": config.data.train, "val": config.data.val}
        check_keys(config.data, {f"data.{name}": path for name, path in paths.items() if path is not None})
        for name, path in paths.items():
            if path is not None:
                limit = config.data.val_max_prompts if name == "val" else None
                prompts[name], report = load_prompts(
                    path, tokenizer, config.data, config.rollout, f"data.{name}", max_prompts=limit
                )
                reports.append(report)
        if reward_model is not None:
            inputs = RewardInputs(config)
            for name, loaded in prompts.items():
                inputs.check(loaded, f"data.{name}")
    else:
        check_keys(config.data, {"data.train": config.data.train})
        targets, report = load_supervised(config.data.train, tokenizer, config.data, config.rollout)
        reports.append(report)
    _check_judge(config, needs, prompts)
    reports += _try_rewards(config, prompts)
    trained = own if critic is None else own + parameters
    checkpoint_bytes = trained * CHECKPOINT_BYTES_PER_PARAMETER[config.model.dtype]
    if uses_reference(config) and config.reference.refresh_every_steps:
        checkpoint_bytes += parameters * (2 if config.model.dtype == "bfloat16" else 4)
    cost = sequence_cost(hf_config)
    return Prepared(layout, cost, prompts, targets, tuple(reports), checkpoint_bytes, chosen, critic, reward_model)


def _trained_model(config: Config) -> dict[str, Any]:
    """config.json without the multi-token-prediction layers that are not trained."""
    hf_config = read_hf_config(config)
    try:
        return hf_config if config.actor.mtp_loss_coefficient else without_mtp(hf_config)
    except ConversionError as error:
        raise ConfigError(f"model.hf_path={config.model.hf_path}: {error}") from error


def _check_implementation(config: Config, hf_config: dict[str, Any], layout: TrainLayout) -> None:
    """What trainer ranks could not be built from; they run on this machine or on one with the same packages."""
    device, arguments = config.cluster.device, model_arguments(hf_config)
    installed = look(cuda=torch.cuda.is_available() if device == "auto" else device == "cuda")
    wishes = wanted(config.actor, config.model, layout, arguments, config.cluster.gpus_per_node)
    recompute_arguments(config.actor, arguments, layout, choose(installed, wishes))


def _check_algorithm(config: Config) -> tuple[Estimator, Needs]:
    """Names and options that the registries refuse are refused here; the estimator, and what the loss needs."""
    algorithm = config.algorithm
    chosen_estimator = estimator(algorithm.advantage, **advantage_options(algorithm))
    if config.trainer.critic_warmup_steps and not chosen_estimator.needs.critic:
        raise ConfigError(
            f"trainer.critic_warmup_steps={config.trainer.critic_warmup_steps}, but algorithm.advantage="
            f"{algorithm.advantage} has no critic; set it to 0, or algorithm.advantage=gae"
        )
    check_mode(algorithm.loss_aggregation)
    response_filter(algorithm)
    return chosen_estimator, Objective.from_config(config, None).loss.needs


def _critic_layout(config: Config, actor: TrainLayout) -> TrainLayout:
    """What can be refused of a critic before it is built."""
    validate_critic(config)
    with named_as("critic", config.critic):
        view = as_actor(config, config.critic)
        hf_config = without_mtp(read_hf_config(view))
        layout = train_layout(view.actor.parallel, num_critic_ranks(config), hf_config)
        check_experts(view.actor.moe, model_arguments(hf_config).transformer)
        _check_implementation(view, hf_config, layout)
    if actor.dp % layout.dp and layout.dp % actor.dp:
        raise ConfigError(
            f"critic.parallel: {layout.dp} data-parallel ranks of the critic beside {actor.dp} of the policy; one "
            "number must divide the other: change critic.num_ranks or critic.parallel"
        )
    return layout


def _reward_model_layout(config: Config, needs: Needs) -> TrainLayout:
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
        _check_implementation(view, hf_config, layout)
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


def _check_weights(config: Config) -> int:
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


def _check_adapters(config: Config, hf_config: dict[str, Any]) -> int:
    """Number of parameters of the adapters, and whether those to start from fit."""
    lora = config.actor.lora
    bound = bound_adapters(lora, hf_config, torch.float32)
    if lora.path is not None:
        check_adapter(lora, hf_config)
    if config.trainer.export_adapter is not None:
        check_peft_names(lora, hf_config)
    return sum(math.prod(shape) for row in bound for shape in row.row.shapes)


def _check_reference(config: Config, hf_config: dict[str, Any], needs: Needs) -> None:
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
        same = model_arguments(_trained_model(view)) == model_arguments(hf_config)
        if same:
            _check_weights(view)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.hf_path", "reference.hf_path")) from error
    if not same:
        raise ConfigError(
            f"reference.hf_path={path} is of another architecture than model.hf_path={config.model.hf_path}; set it to "
            "a checkpoint of the same model, or to null"
        )


def _check_judge(config: Config, needs: Needs, prompts: dict[str, PromptSet]) -> None:
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
        _check_weights(view)
        tokenizer = load_tokenizer(view.model.tokenizer_path or view.model.hf_path)
    check_room(JudgePrompts(tokenizer, template_text(config.judge)), prompts, config.judge.max_prompt_tokens)


def _try_rewards(config: Config, prompts: dict[str, PromptSet]) -> list[str]:
    """Warnings of a call of the reward function, if responses will be graded."""
    warning = try_reward_function(config.reward, prompts["train"][0]) if prompts else None
    return [] if warning is None else [warning]


def open_run_dir(config: Config) -> Path:
    """The run directory, which is made for this user alone if it is not there; one that is there keeps its mode."""
    directory = Path(config.run.dir)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def make_run_dir(config: Config, checkpoint_bytes: int) -> list[str]:
    """Makes the run directory and writes the resolved configuration there; returns the keys that have changed since the
    start before, as replace_config does.

    Raises: ConfigError when it cannot be written or a checkpoint would not fit.
    """
    directory = Path(config.run.dir)
    try:
        open_run_dir(config)
        for name in ("rollouts", "checkpoints"):
            (directory / name).mkdir(exist_ok=True)
        free = shutil.disk_usage(directory).free
        if free < checkpoint_bytes:
            raise ConfigError(
                f"run.dir={directory}: {free / 2**20:.0f} MiB free, but one checkpoint needs about "
                f"{checkpoint_bytes / 2**20:.0f} MiB; set run.dir to a larger disk"
            )
        return replace_config(config, directory)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"run.dir={directory} cannot be written: {reason}; set run.dir to another place") from None
