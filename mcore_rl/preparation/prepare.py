"""Checks before launch that need torch or the data, and the checked inputs of a run. `preflight` runs first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from mcore_rl.algorithms import Estimator, Needs, advantage_options, estimator
from mcore_rl.algorithms.aggregation import check_mode
from mcore_rl.algorithms.configured import configured_loss
from mcore_rl.config import Config
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.episodes import harness_is_function
from mcore_rl.config.objectives import RL
from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.gateway import check_texts
from mcore_rl.config.rules.images import setting_without_images
from mcore_rl.config.rules.models import has_reference, uses_lora, uses_reward_model
from mcore_rl.config.rules.objective import trains_scores
from mcore_rl.config.rules.rollout import has_turns
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.config.schema import ClusterConfig, DataConfig, RolloutConfig, resolved_dtype
from mcore_rl.data.chat.limits import check_limits
from mcore_rl.data.columns import check_keys
from mcore_rl.data.loading import load_prompts, load_supervised
from mcore_rl.data.packing import SequenceCost
from mcore_rl.data.prompts import LoadReport, PromptSet, SupervisedSet, joined
from mcore_rl.data.sampler import Curriculum, PromptSampler, RowWeights
from mcore_rl.data.sources.paths import file_weights
from mcore_rl.data.supervised.targets import TextSet
from mcore_rl.data.templates import PromptRenderer
from mcore_rl.data.tokenizer import eos_token_ids, load_tokenizer
from mcore_rl.errors import ConfigError, CurriculumError
from mcore_rl.preparation.images import check_images, image_processor
from mcore_rl.preparation.models import (
    check_adapters,
    check_implementation,
    check_judge,
    check_reference,
    check_value_weights,
    check_weights,
    critic_layout,
    reward_model_layout,
)
from mcore_rl.preparation.teacher import check_row_temperatures, check_teacher, check_vocabulary
from mcore_rl.preparation.texts import load_splits
from mcore_rl.resolved.costs import sequence_cost
from mcore_rl.resolved.model import ResolvedModel, check_policy_engines, overridden_fields, trained_model
from mcore_rl.rewards.graders.loading import check_data_sources, load_grader, runs_code
from mcore_rl.rewards.model_inputs import RewardInputs
from mcore_rl.rewards.processes.trial import rows_to_try, try_reward_function
from mcore_rl.rollout.connectors.check import check_rows
from mcore_rl.rollout.episodes.load import conversation_of, load_episode, tool_images
from mcore_rl.rollout.gateway.harness.command import check_command
from mcore_rl.rollout.gateway.harness.function import FunctionHarness
from mcore_rl.rollout.tools.parsers import ToolCallParser
from mcore_rl.rollout.tools.toolbox import check_tools
from mcore_rl.sandbox.check import check_sandbox
from mcore_rl.trainer.batches import response_filter
from mcore_rl.trainer.sources import Sources, check_sources, check_teacher_sources
from mcore_rl.trainer.validation import ValidationParts, validation_parts
from mcore_rl.types.json import JsonObject
from mcore_rl.vision.processor import ImageProcessor
from model_converters.mapping.layout import TrainLayout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECKPOINT_BYTES_PER_PARAMETER = {"float32": 12, "bfloat16": 14, "float16": 14}
"""The parameter, the float32 main copy of a 16-bit parameter, and two float32 Adam moments."""


class RunData(NamedTuple):
    """Data of a run: `prompts` by split for reinforcement learning, `targets` for a warm start, or `texts` by split:
    conversations for supervised training, or pairs of responses.

    `validation_parts` are validation prompts that have a metric of their own.
    """

    prompts: dict[str, PromptSet]
    targets: SupervisedSet | None
    reports: list[LoadReport]
    notes: list[str]
    validation_parts: ValidationParts
    texts: Mapping[str, TextSet] = {}

    @property
    def train(self) -> PromptSet:
        """Prompts of the training rows."""
        if self.texts:
            return self.texts["train"].prompts
        return self.prompts["train"] if self.targets is None else self.targets.prompts


@dataclass(frozen=True)
class PreparedModels:
    """Checked models that a run trains. `critic` is the layout of the critic, if the run has one. `teachers` are the
    layouts of teachers on ranks of their own."""

    layout: TrainLayout
    cost: SequenceCost
    checkpoint_bytes: int
    estimator: Estimator
    critic: TrainLayout | None
    teachers: tuple[TrainLayout, ...]


@dataclass(frozen=True)
class Prepared(PreparedModels):
    """Checked inputs of a run. `reward_model` is the layout of the reward model, if the run has one.

    `sampler` samples the training rows. `lines` are printed at the start of the run. `sources`: of the training
    prompts, if the algorithm depends on them.
    """

    reward_model: TrainLayout | None
    data: RunData
    sampler: PromptSampler
    lines: tuple[LoadReport | str, ...]
    sources: Sources | None


def prepare_models(config: Config) -> PreparedModels:
    """Make the checks of `prepare` that concern the trained models, and set defaults for this machine. Reads no data.

    Raises: ConfigError for the first setting that cannot work.
    """
    if config.algorithm.baseline == "role":
        raise ConfigError(
            "algorithm.baseline=role needs the roles of responses, which are not stored to repeat an update; set it to "
            "prompt"
        )
    if config.algorithm.uses_sources or config.teacher.by_source:
        raise ConfigError(
            "algorithm.per_source, algorithm.baseline=source and teacher.by_source need the training data, which is "
            "not read to repeat an update; remove them"
        )
    return _prepare_models(config, _policy(config))


def _check_gpus(cluster: ClusterConfig) -> None:
    """Reject GPUs of this machine that torch cannot use. The preflight only looks for their device files."""
    if cluster.device == "cuda" and cluster.address is None and not torch.cuda.is_available():
        raise ConfigError(
            "cluster.device=cuda (auto, if this machine has GPUs), but torch cannot use a GPU here: the driver is "
            "missing or too old for it; run `mcore-rl doctor`, or set cluster.device=cpu"
        )


def _policy(config: Config) -> ResolvedModel:
    _check_gpus(config.cluster)
    # Set first, since later checks need the data type.
    config.model.dtype = resolved_dtype(config.model.dtype, cuda=config.cluster.uses_cuda)
    return trained_model(config)


def _prepare_models(config: Config, spec: ResolvedModel) -> PreparedModels:
    role, actor, algorithm, hf_config = spec.role, config.actor, config.algorithm, spec.hf_config
    check_implementation(config.cluster, spec)
    parameters = trained = check_value_weights(role) if trains_scores(config) else check_weights(role)
    if uses_lora(actor):
        trained = check_adapters(actor.lora, hf_config, exports=config.trainer.export_adapter is not None)
    chosen, needs = _check_algorithm(algorithm, config.trainer.critic_warmup_steps)
    critic = critic_layout(config, spec.layout) if needs.advantages and chosen.needs.values else None
    if has_reference(config):
        check_reference(config.reference, role, algorithm.policy_loss.name, hf_config, needs)
    teachers = check_teacher(config, spec, chosen)
    refreshed = parameters if has_reference(config) and config.reference.refresh_every_steps else 0
    # Without refresh, the reference is loaded again instead of saved. Random weights (for tests) count as 0 parameters.
    trained += 0 if critic is None else parameters
    size = trained * CHECKPOINT_BYTES_PER_PARAMETER[config.model.dtype]
    size += refreshed * (4 if config.model.dtype == "float32" else 2)
    return PreparedModels(spec.layout, sequence_cost(hf_config), size, chosen, critic, teachers)


def prepare(config: Config) -> Prepared:
    """Run the checks that `preflight.check_run` leaves out, set defaults for this machine, and load the data. Writes no
    files.

    Raises: ConfigError, DataError for the first setting or row that cannot work.
    """
    spec, algorithm = _policy(config), config.algorithm
    check_policy_engines(EngineRole.rollout(config.rollout, config.model), algorithm, spec)
    models, needs = _prepare_models(config, spec), configured_loss(algorithm).needs
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_path)
    check_limits(partial(PromptRenderer, tokenizer, config.data), "model.tokenizer_path")
    check_vocabulary(config, tokenizer)
    reward_model = None
    if uses_reward_model(config.reward_model):
        ranks = config.reward_model.num_ranks or config.num_trainer_ranks
        role = ModelRole.reward_model(config.reward_model, config.model)
        reward_model = reward_model_layout(role, config.cluster, ranks, algorithm.policy_loss.name, needs)
    images = image_processor(config, spec, tokenizer)
    if config.trainer.objective != RL:
        data = _load_texts(config, tokenizer)
    elif needs.advantages:
        data = _load_prompts(config, tokenizer, images)
    else:
        data = _load_targets(config.data, config.rollout, tokenizer, images)
    sampler = _sampler(config.data, data.train, data.reports[0], config.run.seed)
    check_judge(config.judge, config.rollout, config.model, algorithm, data.prompts)
    notes = [*data.notes, *(overridden_fields(config.model, spec.hf_config) if needs.advantages else [])]
    notes += _try_rewards(config.reward, data.prompts, multi_turn=has_turns(config.rollout))
    lines: tuple[LoadReport | str, ...] = (*data.reports, *notes)
    sources = None
    if algorithm.uses_sources or config.teacher.by_source:
        sources = Sources.of(data.prompts["train"].columns["data_source"])
    check_sources(algorithm, sources)
    check_teacher_sources(config.teacher, sources)
    if data.prompts:
        check_row_temperatures(config.teacher, data.prompts["train"])
    return Prepared(**vars(models), reward_model=reward_model, data=data, sampler=sampler, lines=lines, sources=sources)


def _load_targets(
    data: DataConfig, rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None
) -> RunData:
    check_keys(data, {"data.train": data.train})
    targets, report = load_supervised(data.train, tokenizer, data, rollout, images=images)
    return RunData({}, targets, [report], [], ValidationParts())


def _load_texts(config: Config, tokenizer: PreTrainedTokenizerBase) -> RunData:
    texts = load_splits(config, tokenizer)
    return RunData({}, None, texts.reports, list(texts.parts.notes), texts.parts, texts.splits)


def _load_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None) -> RunData:
    """Check graders and episode, then load the prompts. All sets of data.val are joined into the split `val`."""
    data, rollout, reward = config.data, config.rollout, config.reward
    load_grader(reward, config.sandbox)  # raises for functions that do not load
    tools, notes = _check_episode(config, tokenizer, images)
    named = {"data.train": data.train, **data.validation}
    check_keys(data, named)
    loaded, reports = {}, []
    for key, files in named.items():
        limit = None if key == "data.train" else data.val_max_prompts
        loaded[key], report = load_prompts(
            files,
            tokenizer,
            data,
            rollout,
            key,
            max_prompts=limit,
            runs_tools=has_turns(rollout),
            tools=tools,
            images=images,
        )
        check_images(config, key, loaded[key])
        check_rows(rollout, key, loaded[key].columns["extra_info"])
        reports.append(report)
        sources = loaded[key].columns["data_source"]
        check_data_sources(reward, key, report.path, sources)
        # Only now: a run whose graders execute no code needs no sandbox.
        if runs_code(reward, sources):
            check_sandbox(config.sandbox)
    check_texts(rollout, {key: part.has_images for key, part in loaded.items()})
    prompts = {"train": loaded.pop("data.train")}
    if loaded:
        # All sets are validated in one pass; validation_parts finds the rows of each.
        prompts["val"] = joined(list(loaded.values()))
    sets = {key.removeprefix("data.val").removeprefix("."): part.columns["data_source"] for key, part in loaded.items()}
    parts = validation_parts(sets)
    if uses_reward_model(config.reward_model):
        inputs = RewardInputs(config.reward_model, config.model, rollout)
        for name, split in prompts.items():
            inputs.check(split, f"data.{name}")
    return RunData(prompts, None, reports, [*notes, *parts.notes], parts)


def _check_harness(rollout: RolloutConfig, sandbox: SandboxConfig) -> None:
    """Load the function of rollout.harness, or check that its command can run in the sandbox."""
    if rollout.harness is None:
        return
    if harness_is_function(rollout.harness):
        FunctionHarness(rollout.harness, rollout.episode_kwargs)
    else:
        check_command(rollout.harness, sandbox)


def _check_episode(
    config: Config, tokenizer: PreTrainedTokenizerBase, images: ImageProcessor | None
) -> tuple[list[JsonObject], list[str]]:
    """Load the episode and its tools. Return the tool schemas for prompts, and notes about the rendering of turns.

    Raises: ConfigError for an episode, tool, parser or chat template that cannot be used.
    """
    rollout = config.rollout
    if not has_turns(rollout):
        return [], []
    load_episode(rollout)
    _check_harness(rollout, config.sandbox)
    schemas = check_tools(rollout, config.sandbox)
    stop_ids = eos_token_ids(tokenizer, config.model.hf_path)
    load = partial(conversation_of, rollout, config.data.template_kwargs, tokenizer, schemas, stop_ids)
    check_limits(load, "model.tokenizer_path")
    conversation, facts = load()
    notes = []
    if schemas:
        ToolCallParser(rollout.tool_parser, str(tokenizer.chat_template), schemas)
        if not facts.parallel_calls:
            notes.append("rollout.tools: the chat template renders one call per turn; only the first one is executed")
        shown = tool_images(conversation, images, setting_without_images(config))
        if images is not None and shown.fault is not None:
            notes.append(f"rollout.tools: an episode fails if a tool answers with images: {shown.fault}")
    notes += [f"rollout.history={rollout.history}: {rewrite}" for rewrite in facts.rewrites]
    if facts.dated:
        notes.append(
            "the chat template writes today's date into prompts: they change if the run resumes on another day"
        )
    return schemas, notes


def _sampler(data: DataConfig, prompts: PromptSet, report: LoadReport, seed: int) -> PromptSampler:
    """Build the sampler of the training rows, with their weights or curriculum if they are configured."""
    weights = file_weights(data.weights, data.train)
    row_weights = None if weights is None else RowWeights(report.of_files, weights, seed)
    curriculum = None if data.curriculum is None else Curriculum(data.curriculum, prompts, seed)
    try:
        # Orders the first epoch, so that an error of the user's function is reported before processes start.
        return PromptSampler(len(prompts), seed, data.shuffle, weights=row_weights, curriculum=curriculum)
    except CurriculumError as error:
        raise ConfigError(str(error)) from error


def _check_algorithm(algorithm: AlgorithmConfig, critic_warmup_steps: int) -> tuple[Estimator, Needs]:
    """Check names and options against the registries. Return the estimator and the needs of the loss."""
    chosen_estimator = estimator(algorithm.advantage, **advantage_options(algorithm))
    if critic_warmup_steps and not chosen_estimator.needs.values:
        raise ConfigError(
            f"trainer.critic_warmup_steps={critic_warmup_steps}, but algorithm.advantage={algorithm.advantage} has no "
            "critic; set it to 0, or algorithm.advantage=gae"
        )
    check_mode(algorithm.loss_aggregation)
    check_sources(algorithm)
    response_filter(algorithm)
    return chosen_estimator, configured_loss(algorithm).needs


def _try_rewards(reward: RewardConfig, prompts: dict[str, PromptSet], *, multi_turn: bool) -> list[str]:
    """Call the reward functions on a few rows and return warnings. Supervised runs have no prompts and no calls."""
    if not prompts:
        return []
    rows = rows_to_try(reward, prompts["train"].columns["data_source"])
    warnings = [try_reward_function(reward, prompts["train"][row], multi_turn=multi_turn) for row in rows]
    return [warning for warning in warnings if warning is not None]
