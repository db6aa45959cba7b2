"""Work of one training step: responses, micro-batches, updates, and floating-point operations.

Sequence lengths are expectations: plan.mean_response_fraction times rollout.max_prompt_tokens and
rollout.max_response_tokens. A micro-batch is one packed row of whole sequences.

A token costs 2 FLOP per weight that multiplies it (none for embedding lookups; the output projection only where a token
is predicted). Causal attention costs 2 x heads x (query size + value size) per preceding token, so half a sequence on
average, less in layers with a sliding window. Linear attention has a fixed cost per token, and its backward pass
recomputes it. A backward pass costs two forward passes; with LoRA adapters, one forward pass plus attention once more.
Full recomputation adds a forward pass; selective recomputation of core_attn adds attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from mcore_rl.algorithms import advantage_options, estimator
from mcore_rl.algorithms.passes import StepPasses
from mcore_rl.config.models import ActorConfig
from mcore_rl.config.objectives import PAIRED
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.rules.models import has_reference, uses_lora, uses_reward_model
from mcore_rl.config.rules.objective import responses_per_prompt
from mcore_rl.config.rules.teacher import is_on_engines, is_on_server, teacher_prompt_tokens, uses_teacher
from mcore_rl.config.schema import Config
from mcore_rl.megatron.model.model import DTYPES
from mcore_rl.planner.engine import longest_sequence
from mcore_rl.planner.model_size import ModelSize, bound_rows, model_size
from mcore_rl.resolved.costs import attention_flops, linear_attention_flops
from mcore_rl.resolved.installed import planned_machine
from mcore_rl.resolved.layout import model_arguments
from mcore_rl.resolved.model import ResolvedModel, policy_config
from mcore_rl.resolved.recompute import recomputed_modules
from model_converters.families.parts.arguments import ModelArguments
from model_converters.mapping.layout import TrainLayout


@dataclass(frozen=True)
class BatchArithmetic:
    """Sizes of one training step. Lengths are in tokens.

    `microbatches` counts the micro-batches of one rank in one update, for sequences of mean length.
    `most_microbatches` is the same number for sequences of full length.
    """

    responses: int
    updates: int
    responses_per_update: int
    responses_per_rank: float
    mean_prompt: float
    mean_response: float
    microbatches: int
    most_microbatches: int

    @property
    def mean_tokens(self) -> float:
        """Mean length of a sequence."""
        return self.mean_prompt + self.mean_response

    @property
    def tokens(self) -> float:
        """Tokens of all sequences of a step."""
        return self.responses * self.mean_tokens


def batch_arithmetic(config: Config, layout: TrainLayout) -> BatchArithmetic:
    """Compute the sizes of one training step."""
    trainer, rollout, row = config.trainer, config.rollout, config.actor.tokens_per_microbatch
    responses = trainer.prompts_per_step * responses_per_prompt(config)
    per_update = trainer.prompts_per_update * responses_per_prompt(config)
    fraction = config.plan.mean_response_fraction
    prompt, response = rollout.max_prompt_tokens * fraction, rollout.max_response_tokens * fraction
    return BatchArithmetic(
        responses=responses,
        # Every epoch repeats all updates of the step.
        updates=trainer.prompts_per_step // trainer.prompts_per_update * trainer.update_epochs,
        responses_per_update=per_update,
        responses_per_rank=per_update / layout.dp,
        mean_prompt=prompt,
        mean_response=response,
        microbatches=num_microbatches(per_update, row, layout, prompt + response),
        most_microbatches=num_microbatches(per_update, row, layout, longest_sequence(rollout)),
    )


def num_microbatches(responses: int, row_tokens: int, layout: TrainLayout, length: float) -> int:
    """Count one rank's micro-batches in an update on `responses` sequences of `length` tokens each.

    The interleaved schedule needs a multiple of the number of pipeline stages.
    """
    # Sequences are never split. validate() ensures that a row holds at least one.
    per_row = max(int(row_tokens // length), 1)
    count = max(ceil(responses / layout.dp / per_row), 1)
    return count if layout.vpp is None else ceil(count / layout.pp) * layout.pp


@dataclass(frozen=True)
class StepFlops:
    """FLOP of one training step, summed over all ranks.

    `teacher`: the pass of the teachers that run in this job. `values`: the critic's pass before the updates.
    `value_update`: the critic's updates. `reward_model`: the pass of the reward model on ranks.
    """

    generate: float
    logp: float
    update: float
    teacher: float = 0.0
    values: float = 0.0
    value_update: float = 0.0
    reward_model: float = 0.0

    @property
    def critic(self) -> float:
        """All passes of the critic."""
        return self.values + self.value_update


def forward_flops(arguments: ModelArguments, size: ModelSize, mean_tokens: float, predicted: float | None) -> float:
    """Compute the FLOP of one token in a sequence of mean_tokens.

    `predicted` is the share of tokens that pass through the output projection; None: the model has a value head.
    """
    hidden = arguments.transformer["hidden_size"]
    vocabulary = arguments.vocab_size * hidden
    tables = vocabulary if arguments.tied_embeddings or predicted is None else 2 * vocabulary
    # Embedding lookups are no matrix products; the output projection runs for predicted tokens only.
    weights = size.active - tables + (predicted or 0.0) * vocabulary
    attention = attention_flops(arguments.transformer, mean_tokens)
    return 2 * weights + attention + linear_attention_flops(arguments.transformer)


def teacher_flops(config: Config, batch: BatchArithmetic) -> float:
    """Count the FLOP of the teachers' forward pass over a step's responses; 0 for teachers on servers.

    The mean of all teachers, because the responses of each data source are unknown. Prompts with hints have the mean
    fraction of data.max_hinted_tokens, like prompts of theirs. Raises: ConfigError.
    """
    if not uses_teacher(config.teacher) or is_on_server(config.teacher):
        return 0.0
    # Engines compute the logits of prompts, too.
    longer = (teacher_prompt_tokens(config) - config.rollout.max_prompt_tokens) * config.plan.mean_response_fraction
    mean_tokens = batch.mean_tokens + longer
    predicted = 1.0 if is_on_engines(config.teacher) else batch.mean_response / mean_tokens
    forwards = []
    for entry in config.teacher.entries:
        role = ModelRole.teacher(entry, config.actor, config.model)
        hf_config, _ = policy_config(role)
        size = model_size(hf_config, bound_rows(hf_config, DTYPES[config.model.dtype], role.checkpoint))
        forwards.append(forward_flops(model_arguments(hf_config, role.checkpoint), size, mean_tokens, predicted))
    return batch.tokens * mean_tokens / batch.mean_tokens * sum(forwards) / len(forwards)


def passes_before_updates(config: Config, batch: BatchArithmetic) -> float:
    """Count the forward passes over all samples of a step that are made before its updates, besides the teachers' and
    the critic's."""
    if config.trainer.objective in PAIRED:
        return 1.0 + has_reference(config)
    passes, epochs, every = StepPasses.of(config), config.trainer.update_epochs, 0
    if config.actor.moe.router_replay == "engine":
        every = config.actor.moe.replay_check_every_steps
    # `updates` counts all epochs. The first update computes the old log-probabilities in its own forward pass.
    first = epochs / batch.updates
    return (
        (passes.later_updates * (1 - first) if batch.updates > 1 else 0.0)
        + passes.first_update * first
        + passes.score_norms
        + passes.before_first * first
        + passes.before_later * (epochs - first)
        + passes.reference
        + (1 / every if every else 0.0)
    )


def step_flops(
    actor: ActorConfig,
    update_epochs: int,
    arguments: ModelArguments,
    size: ModelSize,
    batch: BatchArithmetic,
    *,
    passes: float = 0.0,
    predicts_tokens: bool = True,
) -> StepFlops:
    """Count the FLOP of one training step. passes: see passes_before_updates."""
    predicted = batch.mean_response / batch.mean_tokens if predicts_tokens else None
    forward = forward_flops(arguments, size, batch.mean_tokens, predicted)
    attention = attention_flops(arguments.transformer, batch.mean_tokens)
    linear = linear_attention_flops(arguments.transformer)
    # Frozen weights have no gradient. The gradient of the adapters is small.
    update = 2 * forward + attention + linear if uses_lora(actor) else 3 * forward
    update += linear  # recomputed in every backward pass
    if actor.recompute == "full":
        update += forward
    elif actor.recompute == "selective" and "core_attn" in actor.recompute_modules:
        update += attention
    return StepFlops(
        generate=batch.tokens * forward,
        logp=batch.tokens * passes * forward,
        update=batch.tokens * update_epochs * update,
    )


def with_value_models(flops: StepFlops, config: Config, batch: BatchArithmetic, *, cuda: bool) -> StepFlops:
    """Add the FLOP of critic and reward model to a step; nothing for models that the run does not have.

    Raises: ConfigError.
    """
    if estimator(config.algorithm.advantage, **advantage_options(config.algorithm)).needs.values:
        values, update = _critic_flops(config, batch, cuda=cuda)
        flops = replace(flops, values=values, value_update=update)
    if uses_reward_model(config.reward_model):
        spec, size = _resolved_value_model(ModelRole.reward_model(config.reward_model, config.model), config)
        forward = forward_flops(spec.arguments, size, batch.mean_tokens, None)
        flops = replace(flops, reward_model=batch.tokens * forward)
    return flops


def _critic_flops(config: Config, batch: BatchArithmetic, *, cuda: bool) -> tuple[float, float]:
    """Count the FLOP of the values of all responses, and of the critic's updates, which critic.update_epochs repeats
    for every pass of the policy's."""
    spec, size = _resolved_value_model(ModelRole.critic(config.critic, config.model), config)
    implementation = spec.implementation(config.cluster.gpus_per_node, planned_machine(cuda=cuda))
    modules = recomputed_modules(config.critic, spec.arguments, implementation)
    section = replace(config.critic, recompute_modules=modules)
    epochs = config.trainer.update_epochs * config.critic.update_epochs
    own = step_flops(section, epochs, spec.arguments, size, batch, passes=1.0, predicts_tokens=False)
    return own.logp, own.update


def _resolved_value_model(role: ModelRole, config: Config) -> tuple[ResolvedModel, ModelSize]:
    spec = ResolvedModel.value_model(role, role.section.num_ranks or config.num_trainer_ranks)
    rows = bound_rows(spec.hf_config, DTYPES[role.model.dtype], role.checkpoint, has_value_head=True)
    return spec, model_size(spec.hf_config, rows)
