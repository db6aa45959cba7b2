"""Ranks of the critic: their process, their group, their role."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from mcore_rl.config.schema import Config
from mcore_rl.types import (
    Metric,
    RankShares,
    TokenColumn,
    TrajectoryBuffers,
)

if TYPE_CHECKING:
    from mcore_rl.megatron.step.rank_batch import ValuedBatch
from collections.abc import Callable
from dataclasses import dataclass

from mcore_rl.resolved.placement import Guests
from mcore_rl.runtime.roles.base import (
    Held,
    RankGroup,
    RankMap,
    Role,
    TrainedRankProcess,
    batch_keys,
    joined,
    see_only,
    set_up_ranks,
)
from mcore_rl.runtime.roles.origins import marks_errors
from mcore_rl.types import Batch, TokenRefs, merge_metrics


@ray.remote(concurrency_groups={"watch": 2, "pass_on": 1, "save": 1}, max_restarts=0)
@marks_errors
class CriticProcess(TrainedRankProcess):
    """One rank of the critic."""

    def __init__(self, name: str, logs: str | None = None, peers: int | None = None) -> None:
        super().__init__(name, logs, peers)
        self._held: Held[ValuedBatch] = Held()

    def setup(self, config: Config, rank: int, world_size: int, init_method: str, visible_devices: str | None) -> None:
        see_only(visible_devices)
        from mcore_rl.megatron.roles.critic import MegatronCritic

        with self.spans.span("setup"):
            self.critic = self.role = MegatronCritic(config, rank, world_size, init_method)
        self.critic.trained.memory.span = self.spans.span
        self.critic.trained.memory.offload()

    @ray.method(num_returns=2)
    def values(self, key: int, shares: RankShares, *chunks: TrajectoryBuffers) -> tuple[None, TokenColumn]:
        """Nothing, which says that it is done, and the values of the share, on ranks of the last stage; keeps the batch
        under `key` for the `update` after it."""
        with self.spans.span("values"):
            batch = self.critic.values(shares.by_update(), list(chunks))
        self._held.keep(key, batch)
        self.critic.trained.memory.offload()
        return None, TokenColumn.of(batch.values)

    def update(self, key: int, *returns: TokenColumn) -> list[dict[str, Metric]]:
        """`returns` have those of all samples of this rank's share."""
        batch, by_sample, reports = self._held.take(key), joined(returns), []
        for index in [*range(len(batch.shares))] * self.critic.update_epochs:
            with self.spans.span("update"):
                reports.append(self.critic.update(batch, index, by_sample))
        self.critic.gather_parameters()
        self.critic.trained.memory.offload()
        return reports


@dataclass
class CriticGroup(RankGroup):
    """All ranks of the critic. `own_batch` gives a batch the data-parallel ranks of this group (batching.spread)."""

    own_batch: Callable[[Batch], Batch]

    def values(self, batch: Batch) -> TokenRefs:
        """Of every trained token, in the object store; the batch stays on the ranks for its updates."""
        key, arguments = next(batch_keys), self.sent_with(self.own_batch(batch))
        calls = [
            handle.values.remote(key, *rank_arguments)
            for handle, rank_arguments in zip(self.handles, arguments, strict=True)
        ]
        self.watch.get([done for done, _ in calls])
        return TokenRefs(tuple(calls[speaker][1] for speaker in self.ranks.speakers), key)

    def update(self, values: TokenRefs, returns: TokenRefs) -> dict[str, Metric]:
        """One optimizer step per update of the batch that `values` are of.

        Raises: NonFiniteError before a non-finite step.
        """
        size = len(self.ranks.speakers)
        columns = [returns.overlapping(dp, size) for dp in self.ranks.dp_rank_of]
        reports = self.on_every_rank("update", [(values.key, *rank_returns) for rank_returns in columns])
        return merge_metrics([report for reports_of_rank in reports for report in reports_of_rank])


def critic_role(ranks: RankMap, own_batch: Callable[[Batch], Batch]) -> Role:
    """`own_batch` as in CriticGroup."""
    return Role(
        name="critic rank",
        process=CriticProcess,
        guests=Guests("critic", len(ranks.dp_rank_of)),
        set_up=set_up_ranks,
        group=lambda handles, nodes, watch: CriticGroup(handles, nodes, ranks, watch, own_batch),
    )
