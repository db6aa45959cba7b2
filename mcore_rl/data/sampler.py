"""Draws prompt rows, epoch after epoch, in an order that a checkpoint can name with two numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from mcore_rl.errors import CheckpointError, DataError


class PromptSampler:
    """Every row once per epoch, in an order that depends on (seed, epoch) alone.

    The order is the same on every platform and numpy version: it sorts raw output of a bit generator, whose stream
    numpy guarantees, instead of calling its shuffling, whose stream it does not.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool = True) -> None:
        if num_rows < 1:
            raise DataError("cannot draw prompts from an empty set; set data.train to a file with rows")
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def draw(self, count: int) -> np.ndarray:
        """The next `count` rows, as int64 [count]; goes on into the next epoch where this one ends."""
        parts = []
        while count > 0:
            if self._position == self._num_rows:
                self._epoch += 1
                self._position = 0
                self._order = self._order_of(self._epoch)
            part = self._order[self._position : self._position + count]
            self._position += len(part)
            count -= len(part)
            parts.append(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity(), "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken.

        Raises: CheckpointError when it belongs to other data, another seed or another order.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the checkpoint's sampler has {name} {state.get(name)}, this run {value}: set run.seed,"
                    " data.train, data.shuffle and rollout.max_prompt_tokens as they were, or start in a new run.dir"
                )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._order = self._order_of(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": self._num_rows, "seed": self._seed, "shuffle": self._shuffle}

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._num_rows, dtype=np.int64)
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
        return np.argsort(bits.random_raw(self._num_rows), kind="stable").astype(np.int64, copy=False)
