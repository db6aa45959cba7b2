"""GPU memory of the models that share GPUs with the policy: critic, reference, teacher, reward model and judge.

The ranks of critic and reward model, and a teacher's own ranks, are processes of their own; rank i runs on the GPU of
trainer rank i. Each loads
its state for a call and moves the parts named in its `offload` section to host memory afterwards. Their parameters come
from Megatron's own model, like the policy's (stages.py). A value head saves its float32 input for the backward pass.

A judge is an engine that sleeps except while it scores. It is counted on every GPU even if it runs only on some. The
same holds for a teacher on engines.

The reference has the policy's layout and parameters and runs in the same process; in a LoRA run it is the policy
without its adapters. A teacher on the actor's ranks runs in the same process and layout, with parameters of its own. On
CPU every process has its own memory, so no memory is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mcore_rl.algorithms import advantage_options, estimator
from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.models import OffloadConfig
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.judge import has_judge_engines, validate_judge
from mcore_rl.config.rules.models import base_is_reference, has_reference, uses_reward_model
from mcore_rl.config.rules.teacher import has_own_ranks, is_on_engines, is_on_ranks, teacher_prompt_tokens
from mcore_rl.config.rules.validation import validate_critic, validate_reward_model
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.model.model import DTYPES
from mcore_rl.megatron.model.output import PolicyModel
from mcore_rl.megatron.model.value_model import ValueModel
from mcore_rl.planner.engine import engine_rank, longest_sequence
from mcore_rl.planner.model_size import bound_rows
from mcore_rl.planner.stages import execution_of, planned_stages
from mcore_rl.planner.state import RankState
from mcore_rl.planner.sync import staging_bytes
from mcore_rl.planner.workload import num_microbatches
from mcore_rl.resolved.installed import planned_machine
from mcore_rl.resolved.layout import model_arguments
from mcore_rl.resolved.model import ResolvedModel, check_engine_model, policy_config
from mcore_rl.resolved.teacher import resolved_teacher, teacher_on_engines, teacher_on_own_ranks


@dataclass(frozen=True)
class ColocatedRank:
    """GPU bytes of one rank of another model: between its calls (`resident`) and at most during a call (`working`).

    `host_bytes` is its host memory between calls. `checkpoint_bytes` is its part of a checkpoint. `averaging_bytes`:
    weights that are loaded after the policy's updates to be averaged with the policy's.
    """

    resident: int
    working: int
    host_bytes: int
    checkpoint_bytes: int = 0
    averaging_bytes: int = 0


@dataclass(frozen=True)
class ColocatedModels:
    """Memory of everything else on the GPU of one trainer rank.

    `teacher` runs in the process of the trainer rank, `teacher_rank` is a teacher's own rank.
    `reference` adds a second copy of the policy's weights; with `reference_leaves` it is in host memory except during
    its own forward pass. `staging` is the staging buffer of weight syncs.
    """

    critic: ColocatedRank | None = None
    reward_model: ColocatedRank | None = None
    judge: ColocatedRank | None = None
    teacher: ColocatedRank | None = None
    teacher_engine: ColocatedRank | None = None
    reference: bool = False
    reference_leaves: bool = True
    staging: int = 0
    teacher_rank: ColocatedRank | None = None

    @property
    def resident(self) -> int:
        """Bytes on the GPU in every phase."""
        return self.staging + sum(rank.resident for rank in self._ranks)

    @property
    def host_bytes(self) -> int:
        return sum(rank.host_bytes for rank in self._ranks)

    @property
    def checkpoint_bytes(self) -> int:
        return sum(rank.checkpoint_bytes for rank in self._ranks)

    @property
    def _ranks(self) -> list[ColocatedRank]:
        ranks = (self.critic, self.reward_model, self.judge, self.teacher, self.teacher_rank, self.teacher_engine)
        return [rank for rank in ranks if rank is not None]


ALONE = ColocatedModels()


@dataclass(frozen=True)
class ColocatedRanks:
    """All ranks of critic, reward model and teacher, in rank order. A tuple is empty without such a model, and on CPU.
    `teacher` and `teacher_rank` are as in ColocatedModels.

    `everywhere` holds what every trainer rank's GPU has.
    """

    critic: tuple[ColocatedRank, ...] = ()
    reward_model: tuple[ColocatedRank, ...] = ()
    teacher: tuple[ColocatedRank, ...] = ()
    everywhere: ColocatedModels = ALONE
    teacher_rank: tuple[ColocatedRank, ...] = ()

    def at(self, rank: int) -> ColocatedModels:
        """Return the models on the GPU of trainer rank `rank`."""
        return self._pick(lambda ranks: ranks[rank] if rank < len(ranks) else None)

    @property
    def widest(self) -> ColocatedModels:
        """The fullest rank of each model: an upper bound for every GPU."""
        return self._pick(lambda ranks: max(ranks, key=lambda rank: rank.working, default=None))

    def _pick(self, choose: Callable[[tuple[ColocatedRank, ...]], ColocatedRank | None]) -> ColocatedModels:
        return replace(
            self.everywhere,
            critic=choose(self.critic),
            reward_model=choose(self.reward_model),
            teacher=choose(self.teacher),
            teacher_rank=choose(self.teacher_rank),
        )


def colocated_ranks(config: Config, policy: ResolvedModel, *, cuda: bool) -> ColocatedRanks:
    """Compute the memory of the run's other models, after the checks that a run makes.

    Raises: ConfigError naming the role's own keys.
    """
    critic: tuple[ColocatedRank, ...] = ()
    model: tuple[ColocatedRank, ...] = ()
    judge = None
    if estimator(config.algorithm.advantage, **advantage_options(config.algorithm)).needs.values:
        validate_critic(config)
        critic = value_model_ranks(ModelRole.critic(config.critic, config.model), config, trained=True, cuda=cuda)
    if uses_reward_model(config.reward_model):
        validate_reward_model(config)
        role = ModelRole.reward_model(config.reward_model, config.model)
        model = value_model_ranks(role, config, trained=False, cuda=cuda)
    if has_judge_engines(config.judge):
        validate_judge(config.judge, config.rollout, config.model, cuda=cuda)
        judge = _sleeping_rank(EngineRole.judge(config.judge, config.rollout, config.model), config, cuda=cuda)
    teacher: tuple[ColocatedRank, ...] = ()
    own: tuple[ColocatedRank, ...] = ()
    teacher_engines = None
    if is_on_ranks(config.teacher):
        built = [config.teacher.entries[number] for number in dict.fromkeys(config.teacher.models)]
        specs = [(resolved_teacher(config.teacher, entry, policy), entry.averages) for entry in built]
        teacher = _take_turns([teacher_ranks(config, spec, averages=averages, cuda=cuda) for spec, averages in specs])
    elif has_own_ranks(config.teacher):
        entries = config.teacher.entries
        own = _take_turns([teacher_ranks(config, teacher_on_own_ranks(config, entry), cuda=cuda) for entry in entries])
    elif is_on_engines(config.teacher):
        teacher_engines = _widest(
            _sleeping_rank(teacher_on_engines(config, entry), config, scores_prompts=True, cuda=cuda)
            for entry in config.teacher.entries
        )
    reference = has_reference(config) and not base_is_reference(config.actor, config.reference)
    staging = 0
    if not is_supervised(config.algorithm):
        staging = staging_bytes(config.weights, config.cluster, config.num_trainer_ranks, cuda=cuda)
    # Computed on CPU as well, for the errors, but there every process has its own memory.
    everywhere = ColocatedModels(
        judge=judge if cuda else None,
        teacher_engine=teacher_engines if cuda else None,
        reference=reference,
        reference_leaves=config.reference.offload,
        staging=staging,
    )
    return ColocatedRanks(critic, model, teacher, everywhere, own) if cuda else ColocatedRanks(everywhere=everywhere)


def _take_turns(teachers: list[tuple[ColocatedRank, ...]]) -> tuple[ColocatedRank, ...]:
    """Compute the memory of every rank of teachers of which one is at work at a time."""
    of_ranks = zip(*teachers, strict=True)
    return tuple(
        ColocatedRank(
            resident=(resident := sum(each.resident for each in ranks)),
            working=resident + max(each.working - each.resident for each in ranks),
            host_bytes=sum(each.host_bytes for each in ranks),
            checkpoint_bytes=sum(each.checkpoint_bytes for each in ranks),
            averaging_bytes=max(each.averaging_bytes for each in ranks),
        )
        for ranks in of_ranks
    )


def _widest(ranks: Iterable[ColocatedRank]) -> ColocatedRank:
    """Return the rank with the highest use at work: every GPU has at most one engine of a section."""
    return max(ranks, key=lambda rank: rank.working)


def _sleeping_rank(role: EngineRole, config: Config, *, scores_prompts: bool = False, cuda: bool) -> ColocatedRank:
    """Compute the memory of an engine rank of a judge or a teacher, asleep and at work. scores_prompts: see
    engine_rank.

    Raises: ConfigError for a model without memory for one sequence.
    """
    hf_config, _ = policy_config(ModelRole.on_engines(role))
    check_engine_model(role, config.algorithm, hf_config)
    dtype, key = DTYPES[role.model.dtype], role.checkpoint
    rows, arguments = bound_rows(hf_config, dtype, key), model_arguments(hf_config, key)
    engine = engine_rank(
        role.section,
        config.cluster,
        rows,
        arguments,
        element_bytes=dtype.itemsize,
        cuda=cuda,
        float32_head=role.model.float32_head,
        scores_prompts=scores_prompts,
    )
    if engine.sequences < 1:
        raise ConfigError(
            f"{role.key('gpu_memory_fraction')}={role.section.gpu_memory_fraction:g} ({role.key('kv_cache_gib')} on "
            f"CPU) leaves no room for one sequence of it; raise it, or {role.key('tp')}"
        )
    return ColocatedRank(resident=engine.asleep_bytes, working=engine.total_bytes, host_bytes=engine.kept_bytes)


def value_model_ranks(role: ModelRole, config: Config, *, trained: bool, cuda: bool) -> tuple[ColocatedRank, ...]:
    """Compute the memory of every rank of a critic (`trained`) or a reward model.

    Raises: ConfigError.
    """
    spec = ResolvedModel.value_model(role, role.section.num_ranks or config.num_trainer_ranks)
    of_stages = _model_ranks(spec, config, ValueModel, role.section.offload, trained=trained, cuda=cuda)
    return tuple(rank for stage in of_stages for rank in stage)


def teacher_ranks(
    config: Config, spec: ResolvedModel, *, averages: bool = False, cuda: bool
) -> tuple[ColocatedRank, ...]:
    """Compute the memory of every rank of a teacher. Ranks of the last stage keep its outputs for all responses of a
    step in host memory and, for the reverse KL over the vocabulary, its output projection on the GPU. An average of
    the policy's weights has float32 values beside bfloat16 weights, and is in checkpoints.

    Raises: ConfigError.
    """
    teacher, trainer, rollout = config.teacher, config.trainer, config.rollout
    element, hidden = DTYPES[spec.role.model.dtype].itemsize, spec.arguments.transformer["hidden_size"]
    whole = teacher.in_loss > 0 and not teacher.top_k
    # A log-probability, and hidden states or the most probable tokens with their log-probabilities.
    token = 4 + (hidden * element if whole else 8 * teacher.top_k + 4)
    tokens = trainer.prompts_per_step * rollout.samples_per_prompt * rollout.max_response_tokens
    outputs = tokens * token // (spec.layout.dp * spec.layout.cp)
    projection = spec.arguments.vocab_size * hidden * element // spec.layout.tp if whole else 0
    offload = OffloadConfig(params=teacher.offload)
    longest = teacher_prompt_tokens(config) + rollout.max_response_tokens
    stages = _model_ranks(
        spec, config, PolicyModel, offload, trained=False, averages=averages, longest=longest, cuda=cuda
    )
    *earlier, last = stages
    last = [
        replace(
            rank,
            resident=rank.resident + projection,
            working=rank.working + projection,
            host_bytes=rank.host_bytes + outputs,
        )
        for rank in last
    ]
    return tuple(rank for stage in (*earlier, last) for rank in stage)


def _model_ranks(
    spec: ResolvedModel,
    config: Config,
    kind: type[PolicyModel],
    offload: OffloadConfig,
    *,
    trained: bool,
    averages: bool = False,
    longest: int | None = None,
    cuda: bool,
) -> list[list[ColocatedRank]]:
    """Compute the memory of every rank of each stage of a model. `offload`: the parts of it that leave the GPU.
    `averages`: the weights are a moving average. `longest`: tokens of a sequence, by default the policy's."""
    implementation = spec.implementation(config.cluster.gpus_per_node, planned_machine(cuda=cuda))
    longest = longest or longest_sequence(config.rollout)
    run = execution_of(spec, implementation, config.plan, longest=longest, cuda=cuda)
    responses = config.trainer.prompts_per_update * config.rollout.samples_per_prompt
    microbatches = num_microbatches(responses, run.section.tokens_per_microbatch, spec.layout, longest)
    stages: list[list[ColocatedRank]] = []
    for activations, states in planned_stages(spec, run, microbatches, kind):
        stages.append([])
        for state in states:
            # The weights of a model without gradients are outside Megatron's buffers and have no padding.
            weights = state.parameters * run.element_bytes if state.copy_bytes is None else state.copy_bytes
            held = state if trained else RankState(state.parameters, weights, 0, 0)
            # A frozen model has no backward pass.
            activation = activations.total_bytes if trained else activations.forward_only_bytes
            activation += state.gathered_update_bytes if trained else state.gathered_forward_bytes
            rank = ColocatedRank(
                resident=held.resident_bytes(offload),
                working=held.total_bytes + max(int(activation), held.piece_bytes),
                host_bytes=held.offloaded_bytes(offload),
                checkpoint_bytes=held.checkpoint_bytes,
            )
            if averages:
                replicas = 1 if spec.role.section.shards_parameters else spec.layout.dp * spec.layout.cp
                rank = _averaged(rank, held, run.element_bytes, offload, replicas=replicas)
            stages[-1].append(rank)
    return stages


def _averaged(
    rank: ColocatedRank, held: RankState, element_bytes: int, offload: OffloadConfig, *, replicas: int
) -> ColocatedRank:
    """Add the float32 averages of a rank's weights. `replicas`: ranks with the same weights, of which one writes a
    checkpoint."""
    # weights_bytes are those that the rank stores, which is less than its parameters with sharded parameters.
    average = held.weights_bytes // element_bytes * 4
    beside = 0 if element_bytes == 4 else average
    on_device, on_host = (0, beside) if offload.params else (beside, 0)
    return ColocatedRank(
        resident=rank.resident + on_device,
        working=rank.working + on_device,
        host_bytes=rank.host_bytes + on_host,
        checkpoint_bytes=average // replicas,
        averaging_bytes=held.weights_bytes if offload.params else 0,
    )
