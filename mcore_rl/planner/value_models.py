"""FLOP of the models with a value head that run beside the policy: critic and reward model."""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.algorithms import advantage_options, estimator
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.rules.models import uses_reward_model
from mcore_rl.config.schema import Config
from mcore_rl.megatron.model.model import DTYPES
from mcore_rl.planner.model_size import ModelSize, bound_rows, model_size
from mcore_rl.planner.workload import BatchArithmetic, StepFlops, forward_flops, step_flops
from mcore_rl.resolved.installed import planned_machine
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.resolved.recompute import recomputed_modules


def with_value_models(flops: StepFlops, config: Config, batch: BatchArithmetic, *, cuda: bool) -> StepFlops:
    """Add the FLOP of critic and reward model to a step; nothing for models that the run does not have.

    Raises: ConfigError.
    """
    if estimator(config.algorithm.advantage, **advantage_options(config.algorithm)).needs.values:
        values, update = _critic_flops(config, batch, cuda=cuda)
        flops = replace(flops, values=values, value_update=update)
    if uses_reward_model(config.reward_model):
        spec, size = _resolved(ModelRole.reward_model(config.reward_model, config.model), config)
        forward = forward_flops(spec.arguments, size, batch.mean_tokens, None)
        flops = replace(flops, reward_model=batch.tokens * forward)
    return flops


def _critic_flops(config: Config, batch: BatchArithmetic, *, cuda: bool) -> tuple[float, float]:
    """Count the FLOP of the values of all responses, and of the critic's updates, which critic.update_epochs repeats
    for every pass of the policy's."""
    spec, size = _resolved(ModelRole.critic(config.critic, config.model), config)
    implementation = spec.implementation(config.cluster.gpus_per_node, planned_machine(cuda=cuda))
    modules = recomputed_modules(config.critic, spec.arguments, implementation)
    section = replace(config.critic, recompute_modules=modules)
    epochs = config.trainer.update_epochs * config.critic.update_epochs
    own = step_flops(section, epochs, spec.arguments, size, batch, passes=1.0, predicts_tokens=False)
    return own.logp, own.update


def _resolved(role: ModelRole, config: Config) -> tuple[ResolvedModel, ModelSize]:
    spec = ResolvedModel.value_model(role, role.section.num_ranks or config.num_trainer_ranks)
    rows = bound_rows(spec.hf_config, DTYPES[role.model.dtype], role.checkpoint, has_value_head=True)
    return spec, model_size(spec.hf_config, rows)
