"""Record of the sets that tokens were sampled from, on the engine rank that samples them.

A set is stored by request and position in its sequence. A token that is sampled again, after a rejected draft, replaces
its earlier set. Samples that the engine discards must not be recorded (vllm/sampler.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from mcore_rl.types.token_sets import encode_ids, max_set_words


class SetRecorder:
    """Sets of running requests, by the engine's id."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[int, np.ndarray]] = {}

    def record(self, requests: Sequence[str], positions: Sequence[int], kept: torch.Tensor) -> None:
        """Store the sets of one pass. A row belongs to a request and to the position of the token that is sampled.

        Shapes: kept bool [rows, V], True for entries with a probability above 0.
        """
        for request, position, run in zip(requests, positions, encode_rows(kept), strict=True):
            self._runs.setdefault(request, {})[position] = run

    def take(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, list[np.ndarray]]:
        """Remove and return the runs of the tokens `wanted[request] = (first position, number of tokens)`.

        Raises: RuntimeError for a token that was not recorded.
        """
        return {request: self._taken(request, *span) for request, span in wanted.items()}

    def forget(self, requests: Iterable[str]) -> None:
        """Remove requests; unknown ones are ignored."""
        for request in requests:
            self._runs.pop(request, None)

    def _taken(self, request: str, first: int, count: int) -> list[np.ndarray]:
        runs = self._runs.get(request, {})
        if missing := [position for position in range(first, first + count) if position not in runs]:
            raise RuntimeError(
                f"the engine recorded no sampling set for {len(missing)} of {count} tokens of {request}, the first at "
                f"position {missing[0]}"
            )
        return [runs.pop(position) for position in range(first, first + count)]


def encode_rows(kept: torch.Tensor) -> list[np.ndarray]:
    """Return the run of each row (see TokenSets). Shapes: bool [rows, V] -> int32 [words] each.

    Only rows that become bit sets are copied whole from the device.
    """
    counts = kept.sum(1).cpu().numpy()
    runs: list[np.ndarray] = [np.empty(0, np.int32)] * len(counts)
    short = np.flatnonzero(counts <= max_set_words(kept.shape[1]))
    # nonzero lists the entries row by row in ascending order.
    ids = kept[torch.from_numpy(short).to(kept.device)].nonzero()[:, 1].to(torch.int32).cpu().numpy()
    for row, run in zip(short.tolist(), np.split(ids, np.cumsum(counts[short])[:-1]), strict=False):
        runs[row] = run.copy()  # a view would keep the ids of all rows
    for row in np.flatnonzero(counts > max_set_words(kept.shape[1])).tolist():
        runs[row] = encode_ids(np.flatnonzero(kept[row].cpu().numpy()), kept.shape[1])
    return runs
