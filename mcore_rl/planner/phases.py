"""GPU memory by phase of a training step.

| phase | trainer rank | colocated engine rank | other models |
|---|---|---|---|
| generate | state that is not offloaded | all of its memory | state that is not offloaded |
| score | state that is not offloaded | asleep | forward pass of the reward model, or the judge awake |
| logp | weights, state that is not offloaded, one forward pass | asleep | weights of the reference |
| teacher | weights, state that is not offloaded | asleep | forward pass of the teacher, or its engine awake |
| critic | weights, state that is not offloaded | asleep | update of the critic |
| update | all state, activations | asleep | state that is not offloaded |
| sync | weights, state that is not offloaded | as asleep, weights | state that is not offloaded |

A teacher on engines or ranks of its own works before the trainer ranks load their weights.

With `actor.offload.*`, parameters and optimizer state move to host memory. Gradients are dropped. With
actor.optimizer.cpu_offload the optimizer state is in host memory all the time. On CPU, ranks and engines are separate
processes: they share no memory and nothing sleeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.models import OffloadConfig
from mcore_rl.config.schema import ClusterConfig
from mcore_rl.planner.activations import StageActivations
from mcore_rl.planner.colocated import ALONE, ColocatedModels, ColocatedRank
from mcore_rl.planner.engine import GIB, EngineRank
from mcore_rl.planner.state import RankState

RESERVE_BYTES = 3 * GIB
"""Reserve on every GPU: CUDA contexts of two processes (0.5 GiB each), NCCL buffers and cuBLAS workspaces."""
FRAGMENTATION = 0.05
"""Share of GPU memory that fragmentation makes unusable. Measured: 2 to 8 % with expandable segments."""
PHASES = ("generate", "score", "logp", "teacher", "critic", "update", "sync")


@dataclass(frozen=True)
class Phases:
    """Bytes of one GPU by phase; on CPU, bytes of one trainer process.

    `by_name` has the phases of this run in the order of a step: "score", "teacher" and "critic" only with these models.
    `host_bytes` is the host memory of this rank and of the models colocated with it during generation.
    `checkpoint_bytes` is their part of a checkpoint.
    """

    by_name: dict[str, int]
    host_bytes: int
    checkpoint_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return max(self.by_name.values())

    @property
    def widest(self) -> str:
        """Name of the phase with the highest use."""
        return max(self.by_name, key=lambda name: self.by_name[name])


def rank_phases(
    offload: OffloadConfig,
    state: RankState,
    activations: StageActivations,
    engine: EngineRank,
    *,
    shared: bool,
    models: ColocatedModels = ALONE,
) -> Phases:
    """Compute the memory of one trainer rank's GPU in each phase.

    `shared` is true if an engine rank is on the same GPU. `models` are the other models on it.
    """
    # Between updates, and while the model is not used at all.
    kept, resident = state.kept_bytes(offload), state.resident_bytes(offload)
    asleep = engine.asleep_bytes if shared else 0
    reference = state.reference_bytes if models.reference else 0
    others = models.resident + (0 if models.reference_leaves else reference)

    # A model at work needs its working memory instead of the part of it that stays on the device between calls.
    def at_work(rank: ColocatedRank | None, trainer: int) -> int:
        return 0 if rank is None else trainer + asleep + others - rank.resident + rank.working

    forward = int(activations.forward_only_bytes) + state.gathered_forward_bytes
    update = int(activations.total_bytes) + state.gathered_update_bytes
    averaging = 0 if models.teacher is None else models.teacher.averaging_bytes
    by_name = {
        "generate": resident + others + (engine.total_bytes if shared else 0),
        "score": max(at_work(models.reward_model, resident), at_work(models.judge, resident)),
        "logp": state.weights_bytes + kept + forward + asleep + models.resident + reference,
        # Engines and ranks of its own score before the trainer ranks load their state for the step.
        "teacher": max(
            at_work(models.teacher, state.weights_bytes + kept),
            at_work(models.teacher_rank, resident),
            at_work(models.teacher_engine, resident),
        ),
        "critic": at_work(models.critic, state.weights_bytes + kept),
        # The activations are freed before the optimizer step, and a moving average follows it.
        "update": state.total_bytes + max(update, state.piece_bytes, averaging) + asleep + others,
        "sync": state.weights_bytes + kept + others + (engine.updated_bytes if shared else 0),
    }
    return Phases(
        {name: size for name, size in by_name.items() if size or name not in ("score", "teacher", "critic")},
        state.offloaded_bytes(offload) + (reference if models.reference_leaves else 0) + models.host_bytes,
        state.checkpoint_bytes + models.checkpoint_bytes,
    )


def usable_bytes(cluster: ClusterConfig) -> int:
    """Return the bytes of one GPU that the plan may fill."""
    return int(cluster.gpu_memory_gib * GIB * (1 - FRAGMENTATION)) - RESERVE_BYTES
