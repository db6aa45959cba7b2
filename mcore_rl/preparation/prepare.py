"""Checks before launch that need torch or the data, and the checked inputs of a run. `preflight` runs first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mcore_rl.algorithms import Estimator, Needs, advantage_options, estimator
from mcore_rl.algorithms.aggregation import check_mode
from mcore_rl.algorithms.registry import configured_loss
from mcore_rl.config import Config
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.defaults import resolve_dtype, uses_cuda
from mcore_rl.config.rules.episodes import has_turns
from mcore_rl.config.rules.lora import uses_lora
from mcore_rl.config.rules.reference import uses_reference
from mcore_rl.config.rules.reward_model import uses_reward_model
from mcore_rl.config.schema import DataConfig
from mcore_rl.data.chat.limits import check_limits
from mcore_rl.data.columns import check_keys
from mcore_rl.data.curriculum import Curriculum
from mcore_rl.data.loading import load_prompts, load_supervised
from mcore_rl.data.packing import SequenceCost
from mcore_rl.data.prompts import LoadReport, PromptSet, joined
from mcore_rl.data.sampler import RowWeights
from mcore_rl.data.sources.paths import file_weights
from mcore_rl.data.supervised import SupervisedSet
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
from mcore_rl.resolved.model import ResolvedModel, check_engine_model, overridden_fields
from mcore_rl.rewards.graders.loading import check_data_sources, load_grader, runs_code
from mcore_rl.rewards.model_inputs import RewardInputs
from mcore_rl.rewards.processes.trial import rows_to_try, try_reward_function
from mcore_rl.sandbox.check import check_sandbox
from mcore_rl.trainer.batches import response_filter
from mcore_rl.trainer.validation import ValidationParts, validation_parts
from model_converters.mapping.layout import TrainLayout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECKPOINT_BYTES_PER_PARAMETER = {"float32": 12, "bfloat16": 14}
"""The parameter, the float32 main copy of a bfloat16 parameter, and two float32 Adam moments."""


@dataclass(frozen=True)
class Prepared:
    """Checked inputs of a run: `prompts` for reinforcement learning, `targets` for supervised training."""

    layout: TrainLayout
    cost: SequenceCost
    prompts: dict[str, PromptSet]
    targets: SupervisedSet | None
    reports: tuple[LoadReport | str, ...]
    checkpoint_bytes: int
    estimator: Estimator
    critic: TrainLayout | None = None
    """Layout of the critic, if the estimator needs one."""
    reward_model: TrainLayout | None = None
    """Layout of the reward model, if the run has one."""
    weights: RowWeights | None = None
    """Sampling weights of the training rows, if data.weights is set."""
    curriculum: Curriculum | None = None
    """Order of the training rows, if data.curriculum is set."""
    validation_parts: ValidationParts = field(default_factory=ValidationParts)
    """Validation prompts that have a metric of their own."""


def prepare(config: Config) -> Prepared:
    """Run the checks that `preflight.check_run` leaves out, set defaults for this machine, and load the data.

    Writes no files.

    Raises: ConfigError, DataError for the first setting or row that cannot work.
    """
    # First, since later checks need the data type.
    resolve_dtype(config.model, cuda=uses_cuda(config.cluster))
    role = ModelRole.policy(config.actor, config.model)
    spec = ResolvedModel.policy(role, config.num_trainer_ranks)
    hf_config, layout = spec.hf_config, spec.layout
    check_engine_model(EngineRole.rollout(config.rollout, config.model), config.algorithm, hf_config)
    check_implementation(role, config.cluster, spec)
    parameters = check_weights(role)
    actor_parameters = parameters
    if uses_lora(config.actor):
        actor_parameters = check_adapters(
            config.actor.lora, hf_config, exports=config.trainer.export_adapter is not None
        )
    chosen, needs = _check_algorithm(config.algorithm, config.trainer.critic_warmup_steps)
    critic = None
    if needs.advantages and chosen.needs.critic:
        critic = critic_layout(config, layout)
    if uses_reference(config.algorithm.kl):
        check_reference(config, hf_config, needs)
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_path)
    check_limits(partial(PromptRenderer, tokenizer, config.data), "model.tokenizer_path")
    reward_model = reward_model_layout(config, needs) if uses_reward_model(config.reward_model) else None
    prompts: dict[str, PromptSet] = {}
    targets: SupervisedSet | None = None
    reports: list[LoadReport]
    notes: list[str] = []
    parts = ValidationParts()
    if needs.advantages:
        load_grader(config.reward, config.sandbox)  # raises for functions that do not load
        tools, notes = check_episode(config, tokenizer)
        prompts, reports, parts = _load_prompts(config, tokenizer, tools)
        notes += [*parts.notes, *overridden_fields(config.model, hf_config)]
        if reward_model is not None:
            inputs = RewardInputs(config.reward_model, config.model, config.rollout)
            for name, loaded in prompts.items():
                inputs.check(loaded, f"data.{name}")
    else:
        check_keys(config.data, {"data.train": config.data.train})
        targets, report = load_supervised(config.data.train, tokenizer, config.data, config.rollout)
        reports = [report]
    train = prompts["train"] if targets is None else targets.prompts
    weights, curriculum = _row_order(config.data, train, reports[0], config.run.seed)
    check_judge(config, needs, prompts)
    warnings = [*notes, *_try_rewards(config.reward, prompts, multi_turn=has_turns(config.rollout))]
    trained = actor_parameters if critic is None else actor_parameters + parameters
    refreshed = parameters if uses_reference(config.algorithm.kl) and config.reference.refresh_every_steps else 0
    checkpoint_bytes = _checkpoint_bytes(config.model.dtype, trained, refreshed)
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


def _checkpoint_bytes(dtype: str, trained: int, refreshed: int) -> int:
    """Return the size of a checkpoint with `trained` parameters and a refreshed reference of `refreshed` parameters.

    Without refresh, the reference is loaded again instead of saved. Random weights (for tests) count as 0 parameters.
    """
    return trained * CHECKPOINT_BYTES_PER_PARAMETER[dtype] + refreshed * (2 if dtype == "bfloat16" else 4)


def _load_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, PromptSet], list[LoadReport], ValidationParts]:
    """Load the prompts of data.train and, joined into one set, of data.val. Prompts show the `tools` to the model."""
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
        check_data_sources(config.reward, key, report.path, sources)
        if runs_code(config.reward, sources):
            check_sandbox(config.sandbox)
    prompts = {"train": loaded.pop("data.train")}
    if loaded:
        prompts["val"] = joined(list(loaded.values()))
    sets = {key.removeprefix("data.val").removeprefix("."): part.data_sources for key, part in loaded.items()}
    return prompts, reports, validation_parts(sets)


def _row_order(
    data: DataConfig, prompts: PromptSet, report: LoadReport, seed: int
) -> tuple[RowWeights | None, Curriculum | None]:
    """Build the sampling weights or the curriculum of the training rows. The curriculum's first epoch is tried."""
    weights = file_weights(data.weights, data.train)
    if data.curriculum is None:
        return None if weights is None else RowWeights(report.of_files, weights, seed), None
    curriculum = Curriculum(data.curriculum, prompts, seed)
    try:
        curriculum.order(0)
    except CurriculumError as error:
        raise ConfigError(str(error)) from error
    return None, curriculum


def _check_algorithm(algorithm: AlgorithmConfig, critic_warmup_steps: int) -> tuple[Estimator, Needs]:
    """Check names and options against the registries. Return the estimator and the needs of the loss."""
    chosen_estimator = estimator(algorithm.advantage, **advantage_options(algorithm))
    if critic_warmup_steps and not chosen_estimator.needs.critic:
        raise ConfigError(
            f"trainer.critic_warmup_steps={critic_warmup_steps}, but algorithm.advantage={algorithm.advantage} has no "
            "critic; set it to 0, or algorithm.advantage=gae"
        )
    check_mode(algorithm.loss_aggregation)
    response_filter(algorithm)
    return chosen_estimator, configured_loss(algorithm).needs


def _try_rewards(reward: RewardConfig, prompts: dict[str, PromptSet], *, multi_turn: bool) -> list[str]:
    """Call the reward functions on a few rows and return warnings. Supervised runs have no prompts and no calls."""
    if not prompts:
        return []
    rows = rows_to_try(reward, prompts["train"].data_sources)
    warnings = [try_reward_function(reward, prompts["train"][row], multi_turn=multi_turn) for row in rows]
    return [warning for warning in warnings if warning is not None]
