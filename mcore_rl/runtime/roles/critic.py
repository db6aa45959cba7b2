"""Process of a critic rank, the group of all ranks, and their role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from mcore_rl.resolved.placement import Guests
from mcore_rl.runtime.calls import remote_method
from mcore_rl.runtime.phases import Phase, staged
from mcore_rl.runtime.roles.base import HeldBatch, SetUpContext, TrainedRankProcess, joined
from mcore_rl.runtime.roles.groups import RankMap, Role, TrainedRankGroup, batch_keys
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.types import Batch, Metric, RankShares, TokenColumn, TokenRefs, TrajectoryBuffers, merge_metrics

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.critic import ValuedBatch


@marks_errors
class CriticProcess(TrainedRankProcess):
    """One rank of the critic."""

    def _build(self, context: SetUpContext, rank: int, world_size: int, address: str) -> None:
        from mcore_rl.megatron.roles.critic import MegatronCritic

        self._held: HeldBatch[ValuedBatch] = HeldBatch()
        self.critic = self.role = MegatronCritic(context.config, rank, world_size, address)
        self.critic.memory.span = self.spans.span
        self.critic.memory.offload()

    @remote_method(num_returns=2)
    def values(self, key: int, shares: RankShares, *chunks: TrajectoryBuffers) -> tuple[None, TokenColumn]:
        """Compute the values of the share, and keep the batch under `key` for its update. The first result (None)
        signals the end of the call; the second contains values on ranks of the last stage, and is empty on others."""
        with self.spans.span("values"):
            batch = self.critic.values(shares.by_update(), list(chunks))
        self._held.keep(key, batch)
        self.critic.memory.offload()
        return None, TokenColumn.of(batch.values)

    def update(self, key: int, *returns: TokenColumn) -> list[dict[str, Metric]]:
        """Train on the held batch with the returns of all samples of the share, and drop it."""
        batch, by_sample, reports = self._held.take(key), joined(returns), []
        # Each epoch repeats the updates in the same order.
        for index in [*range(len(batch.shares))] * self.critic.update_epochs:
            with self.spans.span("update"):
                reports.append(self.critic.update(batch, index, by_sample))
        self.critic.gather_parameters()
        self.critic.memory.offload()
        return reports


CriticActor = ray.remote(concurrency_groups={"watch": 2, "pass_on": 1, "save": 1}, max_restarts=0)(CriticProcess)


@dataclass
class CriticGroup(TrainedRankGroup[CriticProcess]):
    """All ranks of the critic: a ports.Critic. `own_batch` distributes a batch over the group's data-parallel ranks
    (batching.spread)."""

    own_batch: Callable[[Batch], Batch]

    @staged("values", Phase.REPLACE, guest=True)
    def values(self, batch: Batch) -> TokenRefs:
        """Implement Critic.values. The batch stays on the ranks for its updates."""
        key = next(batch_keys)
        arguments = [(key, *of_rank) for of_rank in self.batch_refs(self.own_batch(batch))]
        calls = self.call_each_for_two(CriticProcess.values, arguments)
        self.watch.get([done for done, _ in calls])
        return TokenRefs(tuple(calls[rank][1] for rank in self.ranks.reporting), key)

    @staged("critic_update", Phase.REPLACE, guest=True)
    def update(self, values: TokenRefs, returns: TokenRefs) -> dict[str, Metric]:
        size = len(self.ranks.reporting)
        arguments = [(values.key, *returns.overlapping(dp, size)) for dp in self.ranks.dp_rank_of]
        by_rank = self.call_each(CriticProcess.update, arguments).results()
        return merge_metrics([metrics for of_rank in by_rank for metrics in of_rank])


def critic_role(ranks: RankMap, own_batch: Callable[[Batch], Batch]) -> Role:
    """Return the role of the critic. `own_batch`: see CriticGroup."""
    return Role(
        name="critic rank",
        actor=CriticActor,
        guests=Guests("critic", len(ranks.dp_rank_of)),
        group=lambda processes, nodes, watch, stages: CriticGroup(processes, nodes, watch, ranks, stages, own_batch),
    )
