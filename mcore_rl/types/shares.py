"""A data-parallel rank's part of a batch: one table on its way to the rank, one RankShare per update there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RankShare:
    """One data-parallel rank's part of a Batch for one update.

    Response b is row `rows[b]` of chunk `chunk_ids[b]` of the trajectories that are delivered with the share.
    `origins[b]` (rollout call and row in it) and `samples` (index in the Batch) identify a response in error messages
    and results.

    Shapes: samples int64 [b]; chunk_ids, rows, total_tokens int32 [b]; origins int32 [b, 2]; rewards, advantages,
    loss_weights float32 [b]. `version` is the batch's. groups int32 [b]: number of each response's group in the batch,
    from 0, the same on all ranks; None: unknown.
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
                # A column has a stride of a whole row, 40 bytes, which torch.from_numpy rejects for 8-byte numbers.
                **{name: np.ascontiguousarray(part[name]) for name in names},
                # A rank receives its trajectories as one chunk.
                chunk_ids=np.zeros(len(part), np.int32),
                version=self.version,
            )
            for part in np.split(self.table, np.cumsum(self.counts)[:-1])
        ]
