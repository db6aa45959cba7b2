"""Ranks of the critic: their process, the calls to it, their group, and their role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import ray

from mcore_rl.config.schema import Config
from mcore_rl.resolved.placement import Guests
from mcore_rl.runtime.calls import ProcessCalls, Ref
from mcore_rl.runtime.fanout import GroupCall
from mcore_rl.runtime.roles.base import HeldBatch, TrainedRankProcess, joined, see_only
from mcore_rl.runtime.roles.groups import RankBatchRefs, RankGroup, RankMap, TrainedRankCalls, batch_keys
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.runtime.roles.role import Role, SetUpContext
from mcore_rl.types import Batch, Metric, RankShares, TokenColumn, TokenRefs, TrajectoryBuffers, merge_metrics

if TYPE_CHECKING:
    from mcore_rl.megatron.step.rank_batch import ValuedBatch


@marks_errors
class CriticProcess(TrainedRankProcess):
    """One rank of the critic."""

    def __init__(self, name: str, logs: str | None = None, peers: int | None = None) -> None:
        super().__init__(name, logs, peers)
        self._held: HeldBatch[ValuedBatch] = HeldBatch()

    def setup(self, config: Config, rank: int, world_size: int, init_method: str, visible_devices: str | None) -> None:
        see_only(visible_devices)
        from mcore_rl.megatron.roles.critic import MegatronCritic

        with self.spans.span("setup"):
            self.critic = self.role = MegatronCritic(config, rank, world_size, init_method)
        self.critic.trained.memory.span = self.spans.span
        self.critic.trained.memory.offload()

    @ray.method(num_returns=2)
    def values(self, key: int, shares: RankShares, *chunks: TrajectoryBuffers) -> tuple[None, TokenColumn]:
        """Compute the values of the share, and keep the batch under `key` for its update. The first result is
        ready at the end; the second has values on ranks of the last stage, and is empty on others."""
        with self.spans.span("values"):
            batch = self.critic.values(shares.by_update(), list(chunks))
        self._held.keep(key, batch)
        self.critic.trained.memory.offload()
        return None, TokenColumn.of(batch.values)

    def update(self, key: int, *returns: TokenColumn) -> list[dict[str, Metric]]:
        """Train on the held batch with the returns of all samples of the share, and drop it."""
        batch, by_sample, reports = self._held.take(key), joined(returns), []
        for index in [*range(len(batch.shares))] * self.critic.update_epochs:
            with self.spans.span("update"):
                reports.append(self.critic.update(batch, index, by_sample))
        self.critic.gather_parameters()
        self.critic.trained.memory.offload()
        return reports


CriticActor = ray.remote(concurrency_groups={"watch": 2, "pass_on": 1, "save": 1}, max_restarts=0)(CriticProcess)


class CriticRankCalls(ProcessCalls):
    """Calls to one critic rank."""

    def setup(
        self, config: Config, rank: int, world_size: int, init_method: str, visible_devices: str | None
    ) -> Ref[None]:
        return self.handle.setup.remote(config, rank, world_size, init_method, visible_devices)


class CriticCalls(TrainedRankCalls):
    """Calls to all critic ranks."""

    def values(self, key: int, batch: Sequence[RankBatchRefs]) -> list[tuple[Ref[None], Ref[TokenColumn]]]:
        """Return references to the end and to the values of each rank; the values stay in the object store."""
        return [rank.handle.values.remote(key, *own) for rank, own in zip(self.ranks, batch, strict=True)]

    def update(self, key: int, returns: Sequence[Sequence[object]]) -> GroupCall[list[dict[str, Metric]]]:
        """Train on the held batch. `returns` are references to token columns, per rank."""
        return self.call_each(CriticProcess.update, [(key, *own) for own in returns])


@dataclass
class CriticGroup(RankGroup):
    """All ranks of the critic: a ports.Critic. `own_batch` distributes a batch over the group's data-parallel ranks
    (batching.spread)."""

    own_batch: Callable[[Batch], Batch]

    @cached_property
    def calls(self) -> CriticCalls:
        return CriticCalls(self.processes, self.nodes, self.watch)

    def values(self, batch: Batch) -> TokenRefs:
        """Implement Critic.values. The batch stays on the ranks for its updates."""
        key = next(batch_keys)
        calls = self.calls.values(key, self.batch_refs(self.own_batch(batch)))
        self.watch.get([done for done, _ in calls])
        return TokenRefs(tuple(calls[rank][1] for rank in self.ranks.reporting), key)

    def update(self, values: TokenRefs, returns: TokenRefs) -> dict[str, Metric]:
        size = len(self.ranks.reporting)
        columns = [returns.overlapping(dp, size) for dp in self.ranks.dp_rank_of]
        by_rank = self.calls.update(values.key, columns).results()
        return merge_metrics([metrics for of_rank in by_rank for metrics in of_rank])


def critic_role(ranks: RankMap, own_batch: Callable[[Batch], Batch]) -> Role:
    """Return the role of the critic. `own_batch`: see CriticGroup."""
    return Role(
        name="critic rank",
        actor=CriticActor,
        guests=Guests("critic", len(ranks.dp_rank_of)),
        set_up=_set_up,
        group=lambda processes, nodes, watch: CriticGroup(processes, nodes, ranks, watch, own_batch),
    )


def _set_up(context: SetUpContext, processes: Sequence[ProcessCalls], visible: Sequence[str | None]) -> list[Ref[None]]:
    address, size = context.rendezvous(processes), len(processes)
    return [
        CriticRankCalls(process.handle).setup(context.config, rank, size, address, devices)
        for rank, (process, devices) in enumerate(zip(processes, visible, strict=True))
    ]
