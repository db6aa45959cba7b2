"""What models beside the policy hold of the GPUs that they share with it: critic, reference, reward model, judge.

The ranks of the critic and of the reward model are processes of their own, rank i on the GPU of trainer rank i. Each
loads what a call needs and afterwards sends away what its offload section names. Their parameters are megatron's own,
as in stages.py; what a value head leaves for the backward pass is its input in float32.

A judge is an engine that sleeps but while it scores. It counts on every GPU, though it may be on some only.

The reference has the policy's layout and parameters, in the same process, or is the policy without its adapters. On
CPU every process has its own memory, so there is nothing to share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcore_rl.algorithms import advantage_options, estimator
from mcore_rl.config import Config, num_critic_ranks, num_reward_model_ranks, validate_critic, validate_reward_model
from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.models import ActorConfig
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.judge import has_judge_engines, validate_judge
from mcore_rl.config.rules.lora import base_is_reference
from mcore_rl.config.rules.reference import uses_reference
from mcore_rl.config.rules.reward_model import uses_reward_model
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.model.model import DTYPES
from mcore_rl.megatron.model.value_model import ValueModel
from mcore_rl.planner.activations import Execution, StageActivations, stage_activations
from mcore_rl.planner.batches import num_microbatches
from mcore_rl.planner.engine import ASLEEP_BYTES, engine_rank, longest_sequence
from mcore_rl.planner.model_size import bound_rows
from mcore_rl.planner.stages import stage_parameters
from mcore_rl.planner.state import Numerics, RankState, stage_state
from mcore_rl.planner.sync import gpu_window_bytes
from mcore_rl.resolved.engine_model import check_engine_model
from mcore_rl.resolved.installed import planned_machine
from mcore_rl.resolved.layout import model_arguments
from mcore_rl.resolved.model import ModelSpec, policy_config
from mcore_rl.resolved.recompute import recomputed_modules


@dataclass(frozen=True)
class RoleRank:
    """Bytes of a GPU that a rank of another model holds: between its calls (`resident`), and the most within them
    (`working`); `host_bytes` in host memory between them."""

    resident: int
    working: int
    host_bytes: int


@dataclass(frozen=True)
class Beside:
    """What is on the GPU of one trainer rank beside it: other models, and `windows` of weight syncs. `reference`: the
    policy's weights a second time, which with `reference_leaves` lie in host memory but for their own pass."""

    critic: RoleRank | None = None
    reward_model: RoleRank | None = None
    judge: RoleRank | None = None
    reference: bool = False
    reference_leaves: bool = True
    windows: int = 0

    @property
    def resident(self) -> int:
        """Bytes all the time."""
        return self.windows + sum(role.resident for role in self._roles)

    @property
    def host_bytes(self) -> int:
        return sum(role.host_bytes for role in self._roles)

    @property
    def _roles(self) -> list[RoleRank]:
        return [role for role in (self.critic, self.reward_model, self.judge) if role is not None]


ALONE = Beside()


@dataclass(frozen=True)
class Roles:
    """All ranks of the other models, in their order; empty where there is no such model or nothing is shared.
    `everywhere`: what is beside every trainer rank."""

    critic: tuple[RoleRank, ...] = ()
    reward_model: tuple[RoleRank, ...] = ()
    everywhere: Beside = ALONE

    def at(self, rank: int) -> Beside:
        """What is beside trainer rank `rank`."""
        critic, model = (ranks[rank] if rank < len(ranks) else None for ranks in (self.critic, self.reward_model))
        return replace(self.everywhere, critic=critic, reward_model=model)

    @property
    def widest(self) -> Beside:
        """The fullest rank of each: what no GPU exceeds."""
        critic, model = (
            max(ranks, key=lambda role: role.working, default=None) for ranks in (self.critic, self.reward_model)
        )
        return replace(self.everywhere, critic=critic, reward_model=model)


def roles_of(config: Config, *, cuda: bool) -> Roles:
    """The models that the configuration has beside the policy, checked as a run checks them.

    Raises: ConfigError, by the role's own keys.
    """
    critic: tuple[RoleRank, ...] = ()
    model: tuple[RoleRank, ...] = ()
    if estimator(config.algorithm.advantage, **advantage_options(config.algorithm)).needs.critic:
        validate_critic(config)
        critic = role_ranks(config, ModelRole.critic(config), num_critic_ranks(config), trained=True, cuda=cuda)
    if uses_reward_model(config):
        validate_reward_model(config)
        ranks = num_reward_model_ranks(config)
        model = role_ranks(config, ModelRole.reward_model(config), ranks, trained=False, cuda=cuda)
    judge = judge_rank(config, cuda=cuda) if has_judge_engines(config) else None
    reference = uses_reference(config) and not base_is_reference(config)
    windows = 0 if is_supervised(config.algorithm) else gpu_window_bytes(config, cuda=cuda)
    everywhere = Beside(None, None, judge if cuda else None, reference, config.reference.offload, windows)
    return Roles(critic, model, everywhere) if cuda else Roles(everywhere=everywhere)


def judge_rank(config: Config, *, cuda: bool) -> RoleRank:
    """A rank of a judge engine, asleep and at work.

    Raises: ConfigError for one that cannot work, or has no room for one question.
    """
    validate_judge(config)
    role = EngineRole.judge(config)
    hf_config, _ = policy_config(ModelRole.judge(config))
    check_engine_model(role, config.algorithm, hf_config)
    dtype, key = DTYPES[role.model.dtype], role.checkpoint
    engine = engine_rank(
        role.section,
        config.cluster,
        bound_rows(hf_config, dtype, key),
        model_arguments(hf_config, key),
        element_bytes=dtype.itemsize,
        cuda=cuda,
    )
    if engine.sequences < 1:
        raise ConfigError(
            f"judge.gpu_memory_fraction={config.judge.gpu_memory_fraction:g} (judge.kv_cache_gib on CPU) leaves no "
            "room for one question and its answer; raise it, or judge.tp"
        )
    return RoleRank(resident=ASLEEP_BYTES, working=engine.total_bytes, host_bytes=engine.weights_bytes)


def role_ranks(config: Config, role: ModelRole, num_ranks: int, *, trained: bool, cuda: bool) -> tuple[RoleRank, ...]:
    """Every rank of a value model that is `trained`, or scores.

    Raises: ConfigError.
    """
    spec = ModelSpec.value_model(role, num_ranks)
    implementation = spec.implementation(role, config.cluster.gpus_per_node, planned_machine(cuda=cuda))
    modules = recomputed_modules(role.section, spec.arguments, implementation)
    section = replace(role.section, recompute_modules=modules)
    layout, dtype = spec.layout, DTYPES[config.model.dtype]
    numerics = Numerics.of(section, dtype, fused_optimizer=cuda)
    longest = longest_sequence(config.rollout)
    run = Execution.of(
        section,
        config.plan,
        layout,
        longest=longest,
        element_bytes=dtype.itemsize,
        fused=implementation.transformer_engine,
    )
    responses = config.trainer.prompts_per_update * config.rollout.samples_per_prompt
    microbatches = num_microbatches(responses, section.tokens_per_microbatch, layout, longest)
    ranks: list[RoleRank] = []
    for stage in range(layout.pp):
        chunks = stage_parameters(spec.hf_config, layout, stage, kind=ValueModel, names=role)
        activations = stage_activations(
            spec.arguments,
            stage,
            run,
            section=section,
            microbatches=microbatches,
            largest_weight_elements=max(parameter.elements for chunk in chunks for parameter in chunk),
            predicts_tokens=False,
        )
        states = stage_state(chunks, layout, stage, numerics)
        if trained:
            ranks += [_trained(section, state, activations) for state in states]
        else:
            ranks += [_frozen(section, state.parameters * dtype.itemsize, activations) for state in states]
    return tuple(ranks)


def _trained(section: ActorConfig, state: RankState, activations: StageActivations) -> RoleRank:
    offload = section.offload
    away = sum(
        size
        for leaves, size in (
            (offload.params, state.weights_bytes),
            (offload.grads, state.gradients_bytes),
            (offload.optimizer, state.optimizer_bytes),
        )
        if leaves
    )
    kept = (state.weights_bytes if offload.params else 0) + (state.optimizer_bytes if offload.optimizer else 0)
    return RoleRank(
        resident=state.total_bytes - away,
        working=state.total_bytes + max(int(activations.total_bytes), state.piece_bytes),
        host_bytes=state.host_bytes + kept,
    )


def _frozen(section: ActorConfig, weights_bytes: int, activations: StageActivations) -> RoleRank:
    """Outside megatron's buffers, so without their padding."""
    leaves = section.offload.params
    return RoleRank(
        resident=0 if leaves else weights_bytes,
        working=weights_bytes + int(activations.forward_only_bytes),
        host_bytes=weights_bytes if leaves else 0,
    )
