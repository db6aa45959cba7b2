"""User functions that select the rows of an epoch and their order.

def easy_first(epoch, prompts, seed):
    rows = [row for row, prompt in enumerate(prompts) if epoch > 0 or prompt.extra_info["level"] < 3]
    random.Random(seed * 1000 + epoch).shuffle(rows)
    return rows
"""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mcore_rl.config.functions import check_call, describe, load_function
from mcore_rl.data.prompts import PromptSet
from mcore_rl.errors import CurriculumError

KEY = "data.curriculum"
_WHOLE = (int, np.integer)
ARGUMENTS = ("epoch", "prompts", "seed")


@dataclass
class Curriculum:
    """The function data.curriculum=`spec`, called once per epoch in the process that samples prompts.

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
        # A run that resumes in epoch 0 asks for its order twice, and the function may be slow.
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
