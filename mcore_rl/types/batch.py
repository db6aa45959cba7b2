"""A training step on the driver, and the parts of it that data-parallel ranks receive. Shape letter: B responses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcore_rl.types.data import BuffersRef


@dataclass(frozen=True)
class Batch:
    """One training step on the driver: references and scalars.

    `chunks` refer to TrajectoryBuffers; response b is row `rows[b]` of chunk `chunk_ids[b]`. `updates[u]` lists the
    responses of optimizer update u, `dp_ranks` the data-parallel rank of each response. Both are fixed here so that
    per-token results can stay on the rank that computed them.

    Shapes: chunk_ids, rows, dp_ranks, total_tokens, trained_tokens int32 [B]; group_ids int64 [B]; rewards, advantages,
    loss_weights float32 [B]; updates: tuple of int64 index arrays.
    version: weight version at the start of the first update; no token was sampled with a newer one.
    loss_weights[b] multiplies every trained token of response b, such that the plain sum over all tokens of all ranks
    is the aggregated loss. Ranks need no counts from each other.
    observation_weights: float32 [B], multiply the mean over the observations of each response in the same way; None: 0.
    losses: int32 [B], number of each response's loss in AlgorithmConfig.loss_settings; None: 0 for all.
    teachers: int32 [B], number of each response's teacher in TeacherConfig.entries, -1 for none; None: 0 for all.
    """

    chunks: tuple[BuffersRef, ...]
    chunk_ids: np.ndarray
    rows: np.ndarray
    group_ids: np.ndarray
    total_tokens: np.ndarray
    trained_tokens: np.ndarray
    rewards: np.ndarray
    advantages: np.ndarray
    loss_weights: np.ndarray
    dp_ranks: np.ndarray
    updates: tuple[np.ndarray, ...]
    version: int = 0
    observation_weights: np.ndarray | None = None
    losses: np.ndarray | None = None
    teachers: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def shares(self, num_dp_ranks: int, places: np.ndarray) -> list[RankShares]:
        """Return the part of each data-parallel rank. `places` int32 [B]: row of each response in the single chunk of
        trajectories that its rank receives."""
        # Sort the samples by rank and, within a rank, by update; then count the samples of each (rank, update).
        samples = np.concatenate([*self.updates, np.empty(0, np.int64)])
        # Later epochs repeat samples: every occurrence is a row of the table.
        update_of = np.repeat(np.arange(len(self.updates)), [len(update) for update in self.updates])
        order = np.argsort(self.dp_ranks[samples], kind="stable")
        # The stable sort keeps each rank's samples ordered by update, as RankShares.by_update needs them.
        samples, cells = samples[order], self.dp_ranks[samples[order]] * len(self.updates) + update_of[order]
        table = np.empty(len(samples), SHARE_COLUMNS)
        for name in ("total_tokens", "rewards", "advantages", "loss_weights"):
            table[name] = getattr(self, name)[samples]
        for name in ("observation_weights", "losses"):
            values = getattr(self, name)
            table[name] = 0 if values is None else values[samples]
        # One structured array instead of ten arrays, so that a remote call serializes one object per rank.
        table["samples"], table["rows"] = samples, places[samples]
        table["groups"] = np.unique(self.group_ids, return_inverse=True)[1][samples]
        table["origins"] = np.stack([self.chunk_ids[samples], self.rows[samples]], axis=1)
        # `cells` numbers the pairs (rank, update) row by row.
        counts = np.bincount(cells, minlength=num_dp_ranks * len(self.updates)).reshape(num_dp_ranks, -1)
        # The end of the last part is no split point.
        tables = np.split(table, np.cumsum(counts.sum(axis=1))[:-1])
        return [RankShares(*pair, self.version) for pair in zip(tables, counts, strict=True)]


@dataclass(frozen=True)
class RankShare:
    """One data-parallel rank's part of a Batch for one update.

    Response b is row `rows[b]` of chunk `chunk_ids[b]` of the trajectories that are delivered with the share.
    `origins[b]` (rollout call and row in it) and `samples` (index in the Batch) identify a response in error messages
    and results.

    Shapes: samples int64 [b]; chunk_ids, rows, total_tokens int32 [b]; origins int32 [b, 2]; rewards, advantages,
    loss_weights float32 [b]. `version` is the batch's. groups int32 [b]: number of each response's group in the batch,
    from 0, the same on all ranks; None: unknown. observation_weights float32 [b], losses int32 [b]: see Batch; None: 0.
    """

    samples: np.ndarray
    chunk_ids: np.ndarray
    rows: np.ndarray
    origins: np.ndarray
    total_tokens: np.ndarray
    rewards: np.ndarray
    advantages: np.ndarray
    loss_weights: np.ndarray
    version: int = 0
    groups: np.ndarray | None = None
    observation_weights: np.ndarray | None = None
    losses: np.ndarray | None = None


SHARE_COLUMNS = np.dtype(
    [
        ("samples", np.int64),
        ("rows", np.int32),
        ("origins", np.int32, 2),
        ("total_tokens", np.int32),
        ("rewards", np.float32),
        ("advantages", np.float32),
        ("loss_weights", np.float32),
        ("groups", np.int32),
        ("observation_weights", np.float32),
        ("losses", np.int32),
    ]
)


@dataclass(frozen=True)
class RankShares:
    """One data-parallel rank's part of a Batch for all updates, in one array.

    Shapes: table SHARE_COLUMNS [b], ordered by update; counts int64 [updates], rows of each update.
    """

    table: np.ndarray
    counts: np.ndarray
    version: int

    def by_update(self) -> list[RankShare]:
        """Split the table into one RankShare per update; updates without a response for this rank are empty."""
        names = SHARE_COLUMNS.names or ()
        return [
            RankShare(
                # torch.from_numpy rejects a column if the size of a row is no multiple of the size of its numbers.
                **{name: np.ascontiguousarray(part[name]) for name in names},
                # A rank receives its trajectories as one chunk.
                chunk_ids=np.zeros(len(part), np.int32),
                version=self.version,
            )
            for part in np.split(self.table, np.cumsum(self.counts)[:-1])
        ]
