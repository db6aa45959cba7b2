"""Everything that can be refused before a process starts, after `preflight`, and the inputs that passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mcore_rl.algorithms import Estimator, Needs, advantage_options, estimator
from mcore_rl.algorithms.aggregation import check_mode
from mcore_rl.algorithms.registry import configured_loss
from mcore_rl.config import Config
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.defaults import settle_dtype, uses_cuda
from mcore_rl.config.rules.episodes import has_turns
from mcore_rl.config.rules.lora import uses_lora
from mcore_rl.config.rules.reference import uses_reference
from mcore_rl.config.rules.reward_model import uses_reward_model
from mcore_rl.data.chat.limits import try_out
from mcore_rl.data.columns import check_keys
from mcore_rl.data.order.curriculum import Curriculum
from mcore_rl.data.order.weights import RowWeights
from mcore_rl.data.packing import SequenceCost
from mcore_rl.data.prompts import LoadReport, PromptSet, joined, load_prompts
from mcore_rl.data.sources.paths import file_weights
from mcore_rl.data.supervised import SupervisedSet, load_supervised
from mcore_rl.data.templates import PromptRenderer
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.errors import ConfigError, CurriculumError
from mcore_rl.preparation.episodes import check_episode
from mcore_rl.preparation.models import (
    check_adapters,
    check_implementation,
    check_judge,
    check_reference,
    check_weights,
    critic_layout,
    reward_model_layout,
)
from mcore_rl.resolved.costs import sequence_cost
from mcore_rl.resolved.engine_model import check_engine_model, overridden_fields
from mcore_rl.resolved.model import ModelSpec
from mcore_rl.rewards.graders.loading import check_data_sources, check_reward_function, runs_code
from mcore_rl.rewards.graders.sandboxed import SandboxRunner
from mcore_rl.rewards.model_inputs import RewardInputs
from mcore_rl.rewards.processes.trial import rows_to_try, try_reward_function
from mcore_rl.sandbox.check import check_sandbox
from mcore_rl.trainer.batches import response_filter
from mcore_rl.trainer.validation import ValidationParts, validation_parts
from model_converters.mapping.layout import TrainLayout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    weights: RowWeights | None = None
    """Of the rows that are drawn, where data.weights says any."""
    curriculum: Curriculum | None = None
    """What orders them, where data.curriculum names it."""
    validation_parts: ValidationParts = field(default_factory=ValidationParts)
    """Prompts of validation with metrics of their own."""


def prepare(config: Config) -> Prepared:
    """Checks what `preflight.check_run` had to leave, settles what this machine decides, and loads the data; writes
    nothing.

    Raises: ConfigError, DataError for the first thing that cannot work.
    """
    settle_dtype(config, cuda=uses_cuda(config.cluster))
    spec = ModelSpec.policy(config)
    hf_config, layout = spec.hf_config, spec.layout
    check_engine_model(EngineRole.rollout(config), config.algorithm, hf_config)
    check_implementation(ModelRole.policy(config), config.cluster, spec)
    parameters = check_weights(ModelRole.policy(config))
    actor_parameters = check_adapters(config, hf_config) if uses_lora(config.actor) else parameters
    chosen, needs = _check_algorithm(config)
    critic = None
    if needs.advantages and chosen.needs.critic:
        critic = critic_layout(config, layout)
    if uses_reference(config):
        check_reference(config, hf_config, needs)
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_path)
    try_out(partial(PromptRenderer, tokenizer, config.data), "model.tokenizer_path")
    reward_model = reward_model_layout(config, needs) if uses_reward_model(config) else None
    prompts: dict[str, PromptSet] = {}
    targets: SupervisedSet | None = None
    reports: list[LoadReport]
    notes: list[str] = []
    parts = ValidationParts()
    if needs.advantages:
        check_reward_function(config.reward, SandboxRunner(config.sandbox))
        tools, notes = check_episode(config, tokenizer)
        prompts, reports, parts = _load_prompts(config, tokenizer, tools)
        notes += [*parts.notes, *overridden_fields(config.model, hf_config)]
        if reward_model is not None:
            inputs = RewardInputs(config)
            for name, loaded in prompts.items():
                inputs.check(loaded, f"data.{name}")
    else:
        check_keys(config.data, {"data.train": config.data.train})
        targets, report = load_supervised(config.data.train, tokenizer, config.data, config.rollout)
        reports = [report]
    drawn = prompts["train"] if targets is None else targets.prompts
    weights, curriculum = _drawing(config, drawn, reports[0])
    check_judge(config, needs, prompts)
    warnings = [*notes, *_try_rewards(config, prompts)]
    trained = actor_parameters if critic is None else actor_parameters + parameters
    checkpoint_bytes = _checkpoint_bytes(config, trained, parameters)
    return Prepared(
        layout,
        sequence_cost(hf_config),
        prompts,
        targets,
        (*reports, *warnings),
        checkpoint_bytes,
        chosen,
        critic,
        reward_model,
        weights,
        curriculum,
        parts,
    )


def _checkpoint_bytes(config: Config, trained: int, reference: int) -> int:
    """Size of a checkpoint of `trained` parameters, and of a reference that moves during the run."""
    size = trained * CHECKPOINT_BYTES_PER_PARAMETER[config.model.dtype]
    if uses_reference(config) and config.reference.refresh_every_steps:
        size += reference * (2 if config.model.dtype == "bfloat16" else 4)
    return size


def _load_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, PromptSet], list[LoadReport], ValidationParts]:
    """Prompts of data.train, and of all sets of data.val together; they show the `tools`."""
    named = {"data.train": config.data.train, **config.data.validation}
    check_keys(config.data, named)
    loaded, reports = {}, []
    for key, files in named.items():
        loaded[key], report = load_prompts(
            files,
            tokenizer,
            config.data,
            config.rollout,
            key,
            max_prompts=None if key == "data.train" else config.data.val_max_prompts,
            runs_tools=has_turns(config.rollout),
            tools=tools,
        )
        reports.append(report)
        sources = loaded[key].data_sources
        check_data_sources(config.reward, key, report.path, sources, SandboxRunner(config.sandbox))
        if runs_code(config.reward, sources):
            check_sandbox(config.sandbox)
    prompts = {"train": loaded.pop("data.train")}
    if loaded:
        prompts["val"] = joined(list(loaded.values()))
    sets = {key.removeprefix("data.val").removeprefix("."): each.data_sources for key, each in loaded.items()}
    return prompts, reports, validation_parts(sets)


def _drawing(config: Config, prompts: PromptSet, report: LoadReport) -> tuple[RowWeights | None, Curriculum | None]:
    """What says how often rows are drawn; the curriculum is tried for the first epoch."""
    weights = file_weights(config.data.weights, config.data.train)
    if config.data.curriculum is None:
        return None if weights is None else RowWeights(report.of_files, weights, config.run.seed), None
    curriculum = Curriculum(config.data.curriculum, prompts, config.run.seed)
    try:
        curriculum.order(0)
    except CurriculumError as error:
        raise ConfigError(str(error)) from error
    return None, curriculum


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
    return chosen_estimator, configured_loss(algorithm).needs


def _try_rewards(config: Config, prompts: dict[str, PromptSet]) -> list[str]:
    """Warnings of calls of the reward functions, if responses will be graded."""
    if not prompts:
        return []
    rows = rows_to_try(config.reward, prompts["train"].data_sources)
    warnings = [
        try_reward_function(config.reward, prompts["train"][row], multi_turn=has_turns(config.rollout)) for row in rows
    ]
    return [warning for warning in warnings if warning is not None]
