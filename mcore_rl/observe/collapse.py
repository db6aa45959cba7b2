"""Warnings about signs of collapse or missing learning signal. Each sign is reported once per run."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rl.observe.signs import GRADIENT, GRADIENT_TEXT, WINDOW, Sign


@dataclass
class CollapseSigns:
    """Checks the metrics of every step for `signs`, and the gradient norm for outliers."""

    signs: Sequence[Sign]
    _first: dict[str, float] = field(default_factory=dict)
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _reported: set[str] = field(default_factory=set)

    def check(self, step: int, values: Mapping[str, float | None]) -> list[str]:
        """Return warnings for signs that appear for the first time."""
        warnings = []
        for sign in self.signs:
            now = values.get(sign.figure)
            if now is None:
                continue
            first = self._first.setdefault(sign.figure, now)
            if step > sign.after_step and sign.holds(now, first):
                text = sign.text.format(now=now, first=first, reward=values.get("reward/mean") or 0.0)
                warnings += self._report(sign.figure, f"step {step}: {text}")
        norm = values.get(GRADIENT)
        if norm is not None:
            # Until WINDOW norms are known, a norm is compared with itself, so nothing is reported.
            usual = statistics.median(self._norms) if len(self._norms) == WINDOW else norm
            if norm > 20 * usual > 0:
                warnings += self._report(GRADIENT, f"step {step}: {GRADIENT_TEXT.format(now=norm, times=norm / usual)}")
            self._norms.append(norm)
        return warnings

    def _report(self, figure: str, warning: str) -> list[str]:
        if figure in self._reported:
            return []
        self._reported.add(figure)
        return [warning]
