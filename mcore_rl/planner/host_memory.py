"""Host memory of a node, by purpose.

| part | bytes | during |
|---|---|---|
| offloaded state | RankState.offloaded_bytes of trainer ranks; frozen models and judges between their calls | the run |
| kept weights | EngineRank.kept_bytes of colocated engines that sleep and continue with the same weights | the run |
| checkpoint | RankState.checkpoint_bytes of trainer ranks, with checkpoint.async_save | writing |
| routed experts | EngineRank.routing_bytes of engines, with actor.moe.router_replay=engine | the run |
| weight buckets | staging buffers of weight syncs, unless they are on the GPU | the run |
| weight copies | weights that cross hosts or files, at sender and receiver, with weights.delta | the run |
| object store | cluster.object_store_gib | the run |

Colocated engines keep their weights for the comparison before the first step, for reward models and judges, and for
checkpoints. torch never returns pinned memory to the system, so it counts in every phase. Not counted, because they are
below 1 GiB per node for DeepSeek-V3 on 512 GPUs: message queues of vLLM (0.2 GiB per engine), journals, token ids and
log-probabilities of trajectories, vLLM's store of routed experts (one byte per layer and choice, once per engine).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.schema import Config
from mcore_rl.planner.engine import GIB, EngineRank
from mcore_rl.planner.phases import Phases
from mcore_rl.planner.sync import WeightSync
from mcore_rl.resolved.placement import place


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one node by purpose. The fields are the keys of `host_bytes` in `plan --json`."""

    offloaded_state: int = 0
    kept_weights: int = 0
    checkpoint: int = 0
    routed_experts: int = 0
    weight_buckets: int = 0
    object_store: int = 0
    weight_copies: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def describe(self) -> str:
        """List the parts that have memory, in GiB."""
        parts = [(name.replace("_", " "), size) for name, size in asdict(self).items() if size]
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)


def fullest_node(
    config: Config, phases: Sequence[Phases], engine: EngineRank, sync: WeightSync, *, cuda: bool
) -> HostMemory:
    """Compute the host memory of the node that has most. `phases`: by trainer rank."""
    cluster, supervised = config.cluster, is_supervised(config.algorithm)
    num_engines = 0 if supervised else config.rollout.num_engines
    placed = place(cluster, config.rollout, len(phases), on_gpus=cuda, num_engines=num_engines)
    keeps = engine.kept_bytes if cluster.placement == "colocated" else 0
    away, snapshots, engine_ranks = Counter[int](), Counter[int](), placed.computing["rollout"]
    for node, rank in zip(placed.ranks, phases, strict=True):
        away[node] += rank.host_bytes
        snapshots[node] += rank.checkpoint_bytes if config.checkpoint.async_save else 0
    nodes = (
        HostMemory(
            offloaded_state=away[node],
            kept_weights=keeps * engine_ranks[node],
            checkpoint=snapshots[node],
            routed_experts=engine.routing_bytes * engine_ranks[node],
            weight_buckets=0 if supervised else sync.slots_bytes,
            weight_copies=0 if supervised else sync.copies_bytes,
            object_store=int(cluster.object_store_gib * GIB),
        )
        for node in {*away, *engine_ranks}
    )
    return max(nodes, key=lambda memory: memory.total)
