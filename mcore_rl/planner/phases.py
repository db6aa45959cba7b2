"""Who holds a GPU's memory in each phase of a step.

| phase | trainer rank | colocated engine rank | other models |
|---|---|---|---|
| generate | what is not offloaded | weights, workspace, KV cache | what is not offloaded |
| score | what is not offloaded | asleep | a reward model's pass, or a judge awake |
| logp | weights, and what is not offloaded; one forward pass | asleep | the reference's weights |
| critic | weights, and what is not offloaded | asleep | the critic's update |
| update | everything, and activations | asleep | what is not offloaded |
| sync | weights, and what is not offloaded | weights | what is not offloaded |

With `actor.offload.*` parameters and optimizer state lie in host memory while they are away; gradients are dropped,
not kept. With actor.optimizer.cpu_offload the optimizer's state is there all the time. On CPU ranks and engines are
processes of their own, so nothing is shared and nothing sleeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.schema import Config
from mcore_rl.planner.activations import StageActivations
from mcore_rl.planner.engine import ASLEEP_BYTES, GIB, EngineRank
from mcore_rl.planner.roles import ALONE, Beside, RoleRank
from mcore_rl.planner.state import RankState

RESERVE_BYTES = 3 * GIB
"""Of every GPU: CUDA contexts of two processes (0.5 GiB each), buffers of NCCL and workspaces of cuBLAS."""
FRAGMENTATION = 0.05
"""Of the memory, which the allocator cannot hand out: measured figures lie between 2 and 8 % with expandable
segments."""
PHASES = ("generate", "score", "logp", "critic", "update", "sync")


@dataclass(frozen=True)
class Phases:
    """Bytes of one GPU by phase; on CPU of one trainer process. `host_bytes`: what the rank, and those of other models
    beside it, put into host memory while the engine generates. `score` and `critic` are 0 without such a model."""

    generate: int
    logp: int
    update: int
    sync: int
    host_bytes: int
    score: int = 0
    critic: int = 0

    @property
    def peak_bytes(self) -> int:
        return max(self.by_name.values())

    @property
    def widest(self) -> str:
        return max(self.by_name, key=lambda name: self.by_name[name])

    @property
    def by_name(self) -> dict[str, int]:
        """The phases that there are, in the order of a step."""
        every = {name: int(getattr(self, name)) for name in PHASES}
        return {name: size for name, size in every.items() if size or name not in ("score", "critic")}


def rank_phases(
    config: Config,
    state: RankState,
    activations: StageActivations,
    engine: EngineRank,
    *,
    shared: bool,
    beside: Beside = ALONE,
) -> Phases:
    """`shared`: the rank's GPU is an engine's too; `beside`: what other models hold of it."""
    offload = config.actor.offload
    stay = 0 if offload.grads else state.gradients_bytes
    stay += 0 if offload.optimizer else state.optimizer_bytes
    resident = stay + (0 if offload.params else state.weights_bytes)
    asleep = ASLEEP_BYTES if shared else 0
    reference = state.weights_bytes if beside.reference else 0
    others = beside.resident + (0 if beside.reference_leaves else reference)

    def at_work(role: RoleRank | None, trainer: int) -> int:
        return 0 if role is None else trainer + asleep + others - role.resident + role.working

    return Phases(
        generate=resident + others + (engine.total_bytes if shared else 0),
        score=max(at_work(beside.reward_model, resident), at_work(beside.judge, resident)),
        logp=state.weights_bytes + stay + int(activations.forward_only_bytes) + asleep + beside.resident + reference,
        critic=at_work(beside.critic, state.weights_bytes + stay),
        # The optimizer steps when the activations are gone.
        update=state.total_bytes + max(int(activations.total_bytes), state.piece_bytes) + asleep + others,
        sync=state.weights_bytes + stay + others + (engine.weights_bytes if shared else 0),
        host_bytes=state.host_bytes
        + (state.weights_bytes if offload.params else 0)
        + (state.optimizer_bytes if offload.optimizer else 0)
        + (reference if beside.reference_leaves else 0)
        + beside.host_bytes,
    )


def usable_bytes(config: Config) -> int:
    """Of one GPU, for what the plan counts."""
    return int(config.cluster.gpu_memory_gib * GIB * (1 - FRAGMENTATION)) - RESERVE_BYTES
