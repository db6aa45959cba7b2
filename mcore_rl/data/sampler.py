"""Prompt sampler whose position is restored from a few numbers in a checkpoint, the weights of its rows, and users'
functions that select the rows of an epoch."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mcore_rl.config.functions import check_call, describe, load_function
from mcore_rl.data.prompts import PromptSet
from mcore_rl.errors import CheckpointError, CurriculumError, DataError

KEY = "data.curriculum"
ARGUMENTS = ("epoch", "prompts", "seed")
_PARTS = 1_000_000
"""Weights are rounded to multiples of 1 / _PARTS and computed as integers, which is exact on every platform."""


@dataclass(frozen=True)
class RowWeights:
    """Number of `rows` and `weights` of each file, in the order of the prompt set.

    In E epochs a row of weight w is drawn floor(w E) or ceil(w E) times, and a file of n rows floor(n w E) times in
    total. The rows with the additional draw depend only on `seed`, so an epoch needs no state.
    """

    rows: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

    def counts(self, epoch: int) -> np.ndarray:
        """Return the number of draws of each row in an epoch: int64 [N]."""
        counts = [
            self._counts_of_file(file, num_rows, weight, epoch)
            for file, (num_rows, weight) in enumerate(zip(self.rows, self.weights, strict=True))
        ]
        return np.concatenate(counts)

    def identity(self) -> list[list[float]]:
        """Return the values that must be equal in a resumed run, for the checkpoint."""
        return [[rows, weight] for rows, weight in zip(self.rows, self.weights, strict=True)]

    def _counts_of_file(self, file: int, num_rows: int, weight: float, epoch: int) -> np.ndarray:
        """Return floor(w (epoch + 1) + phase) - floor(w epoch + phase) per row, with phases k / n in random order.

        By Hermite's identity the sum over rows is floor(n w (epoch + 1)) - floor(n w epoch).
        """
        whole, part = divmod(max(round(weight * _PARTS), 1), _PARTS)
        if not part or not num_rows:
            return np.full(num_rows, whole, np.int64)
        # The final 1 makes this stream differ from the streams of (seed, epoch): SeedSequence ignores trailing zeros.
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, file, 1])).random_raw(num_rows)
        phases = np.argsort(np.argsort(bits, kind="stable"), kind="stable").astype(np.int64) * _PARTS
        # Only the fractional part of w * epoch matters; the modulo keeps the products within 64 bits.
        before = epoch * part % _PARTS * num_rows
        whole_parts = _PARTS * num_rows
        return whole + (before + part * num_rows + phases) // whole_parts - (before + phases) // whole_parts


@dataclass
class Curriculum:
    """The function data.curriculum=`spec`, called once per epoch in the process that samples prompts.

    It selects the rows of the epoch and their order:

        def easy_first(epoch, prompts, seed):
            rows = [row for row, prompt in enumerate(prompts) if epoch > 0 or prompt.extra_info["level"] < 3]
            random.Random(seed * 1000 + epoch).shuffle(rows)
            return rows

    Raises: ConfigError if `spec` does not name a function of (epoch, prompts, seed).
    """

    spec: str
    prompts: PromptSet
    seed: int
    _latest: tuple[int, np.ndarray] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._function = load_function(KEY, self.spec)
        check_call(f"{KEY}={self.spec}", self._function, ARGUMENTS, {}, f"f({', '.join(ARGUMENTS)})")

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch, int64 [draws]; a row may occur more than once.

        Raises: CurriculumError if the function raises or returns anything but indices of prompts.
        """
        # A run that resumes in epoch 0 needs its order twice, and the function may be slow.
        if self._latest is None or self._latest[0] != epoch:
            self._latest = epoch, self._call(epoch)
        return self._latest[1]

    def _call(self, epoch: int) -> np.ndarray:
        context = f"{KEY}={self.spec}, called for epoch {epoch}"
        try:
            found: Any = self._function(epoch=epoch, prompts=self.prompts, seed=self.seed)
            rows = found if isinstance(found, np.ndarray) else list(found)
        # SystemExit too: sys.exit() in the user's function must not end the run without a message.
        except (Exception, SystemExit) as error:
            raise CurriculumError(f"{context}, raised {describe(error)}{_place(error)}") from error
        return _checked(rows, len(self.prompts), context)


def fingerprint(order: np.ndarray) -> int:
    """Return the CRC-32 of an order, by which a resumed run detects a changed curriculum."""
    return zlib.crc32(order.astype("<i8").tobytes())


def _checked(rows: np.ndarray | Sequence[Any], num_prompts: int, context: str) -> np.ndarray:
    if isinstance(rows, np.ndarray):
        whole = rows.ndim == 1 and np.issubdtype(rows.dtype, np.integer)
        wrong = None if whole else f"an array of {rows.dtype} with {rows.ndim} dimensions"
    else:
        # bool is a subclass of int; a list of flags instead of indices is a likely mistake.
        wrong = next(
            (_shown(row) for row in rows if isinstance(row, bool) or not isinstance(row, int | np.integer)), None
        )
    if wrong is not None:
        raise CurriculumError(f"{context}, returned {wrong}; return a list of whole numbers, the indices of prompts")
    if not len(rows):
        raise CurriculumError(f"{context}, returned no rows; an epoch needs at least one")
    outside = next((int(row) for row in rows if not 0 <= row < num_prompts), None)
    if outside is not None:
        raise CurriculumError(f"{context}, returned row {outside}; valid rows are 0 to {num_prompts - 1}")
    return np.array(rows, np.int64)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"


def _place(error: BaseException) -> str:
    """Format file and line of the innermost frame in the user's file, which is the first file after ours."""
    # The first frame is the call in this file.
    frames = traceback.extract_tb(error.__traceback__)[1:]
    if not frames:
        return ""
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({own[-1].filename}, line {own[-1].lineno}, in {own[-1].name})"


_CURRICULUM = "curriculum"
"""Key of the order's fingerprint in the state, if there is a curriculum."""


class PromptSampler:
    """Sampler of rows without replacement: every row once per epoch, in an order that depends only on (seed, epoch).

    `weights` change the number of draws per row; a `curriculum` replaces rows and order.

    The order is equal on every platform and numpy version: it sorts the raw output of a bit generator, whose stream
    numpy guarantees; the stream of its shuffles is not guaranteed.
    """

    def __init__(
        self,
        num_rows: int,
        seed: int,
        shuffle: bool = True,
        *,
        weights: RowWeights | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        if num_rows < 1:
            raise DataError("cannot draw prompts from an empty set; set data.train to a file with rows")
        self._num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._weights, self._curriculum = weights, curriculum
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def draw(self, count: int) -> np.ndarray:
        """Return the next `count` rows as int64 [count], continuing in the next epoch if necessary.

        Raises: CurriculumError.
        """
        parts = []
        while count > 0:
            if self._position == len(self._order):
                # Compute the order first: if it raises, the position is unchanged.
                self._order = self._order_of(self._epoch + 1)
                self._epoch += 1
                self._position = 0
            part = self._order[self._position : self._position + count]
            self._position += len(part)
            count -= len(part)
            parts.append(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def state_dict(self) -> dict[str, Any]:
        state = {**self._identity(), "epoch": self._epoch, "position": self._position}
        return state if self._curriculum is None else state | {_CURRICULUM: fingerprint(self._order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position.

        Raises: CheckpointError if the state belongs to other data, another seed or another order.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the checkpoint's sampler has {name} {state.get(name)}, this run {value}: restore run.seed,"
                    " data.train, data.weights, data.shuffle and rollout.max_prompt_tokens, or start in a new run.dir"
                )
        epoch = int(state["epoch"])
        order = self._order_of(epoch)
        if state.get(_CURRICULUM) != (None if self._curriculum is None else fingerprint(order)):
            raise CheckpointError(
                f"the checkpoint is in the middle of epoch {epoch}, for which data.curriculum now gives another order:"
                " restore the function and make it depend only on (epoch, prompts, seed), or start in a new run.dir"
            )
        self._epoch, self._position, self._order = epoch, int(state["position"]), order

    def _identity(self) -> dict[str, Any]:
        # Older states have no `weights`; their value None equals the value of a run without weights.
        weights = None if self._weights is None else self._weights.identity()
        return {"num_rows": self._num_rows, "seed": self._seed, "shuffle": self._shuffle, "weights": weights}

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._curriculum is not None:
            return self._curriculum.order(epoch)
        rows = np.arange(self._num_rows, dtype=np.int64)
        if self._weights is not None:
            rows = np.repeat(rows, self._weights.counts(epoch))
        if not self._shuffle:
            return rows
        bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
        return rows[np.argsort(bits.random_raw(len(rows)), kind="stable")]
