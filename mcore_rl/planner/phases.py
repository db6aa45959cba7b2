"""Who holds a GPU's memory in each phase of a step.

| phase | trainer rank | colocated engine rank |
|---|---|---|
| generate | what is not offloaded | weights, workspace, KV cache |
| annotate | weights, and what is not offloaded; one forward pass | asleep |
| update | everything, and activations | asleep |
| sync | weights, and what is not offloaded | weights |

With `actor.offload.*` parameters and optimizer state lie in host memory while they are away; gradients are dropped,
not kept. With actor.optimizer.cpu_offload the optimizer's state is there all the time. On CPU ranks and engines are
processes of their own, so nothing is shared and nothing sleeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.schema import Config
from mcore_rl.planner.activations import StageActivations
from mcore_rl.planner.engine import GIB, EngineRank
from mcore_rl.planner.state import RankState

RESERVE_BYTES = 3 * GIB
"""Of every GPU: CUDA contexts of two processes (0.5 GiB each), buffers of NCCL and workspaces of cuBLAS."""
FRAGMENTATION = 0.05
"""Of the memory, which the allocator cannot hand out: measured figures lie between 2 and 8 % with expandable
segments."""
ASLEEP_BYTES = GIB
"""What a sleeping engine keeps: graphs, buffers and whatever is not in its pools."""


@dataclass(frozen=True)
class Phases:
    """Bytes of one GPU by phase; on CPU of one trainer process. `host_bytes`: what the rank puts into host memory
    while the engine generates."""

    generate: int
    annotate: int
    update: int
    sync: int
    host_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.generate, self.annotate, self.update, self.sync)

    @property
    def widest(self) -> str:
        return max(("generate", "annotate", "update", "sync"), key=lambda name: int(getattr(self, name)))


def rank_phases(
    config: Config, state: RankState, activations: StageActivations, engine: EngineRank, *, shared: bool
) -> Phases:
    """`shared`: the rank's GPU is an engine's too."""
    offload = config.actor.offload
    stay = 0 if offload.grads else state.gradients_bytes
    stay += 0 if offload.optimizer else state.optimizer_bytes
    resident = stay + (0 if offload.params else state.weights_bytes)
    asleep = ASLEEP_BYTES if shared else 0
    return Phases(
        generate=resident + (engine.total_bytes if shared else 0),
        annotate=state.weights_bytes + stay + int(activations.forward_only_bytes) + asleep,
        # The optimizer steps when the activations are gone.
        update=state.total_bytes + max(int(activations.total_bytes), state.piece_bytes) + asleep,
        sync=state.weights_bytes + stay + (engine.weights_bytes if shared else 0),
        host_bytes=state.host_bytes
        + (state.weights_bytes if offload.params else 0)
        + (state.optimizer_bytes if offload.optimizer else 0),
    )


def usable_bytes(config: Config) -> int:
    """Of one GPU, for what the plan counts."""
    return int(config.cluster.gpu_memory_gib * GIB * (1 - FRAGMENTATION)) - RESERVE_BYTES
