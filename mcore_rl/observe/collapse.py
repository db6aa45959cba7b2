"""Warnings about signs that a run is about to collapse, or teaches nothing. Each sign is reported once."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rl.observe.signs import GRADIENT, GRADIENT_TEXT, WINDOW, Sign


@dataclass
class CollapseSigns:
    """Looks at every step's figures for `signs`, and at the gradient's norm; remembers the first figures, the recent
    norms, and what was said."""

    signs: Sequence[Sign]
    _first: dict[str, float] = field(default_factory=dict)
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _said: set[str] = field(default_factory=set)

    def look(self, step: int, values: Mapping[str, float | None]) -> list[str]:
        """Sentences about signs that this step shows for the first time."""
        sentences = []
        for sign in self.signs:
            now = values.get(sign.figure)
            if now is None:
                continue
            first = self._first.setdefault(sign.figure, now)
            if step > sign.after_step and sign.holds(now, first):
                text = sign.text.format(now=now, first=first, reward=values.get("reward/mean") or 0.0)
                sentences += self._say(sign.figure, f"step {step}: {text}")
        norm = values.get(GRADIENT)
        if norm is not None:
            usual = statistics.median(self._norms) if len(self._norms) == WINDOW else norm
            if norm > 20 * usual > 0:
                sentences += self._say(GRADIENT, f"step {step}: {GRADIENT_TEXT.format(now=norm, times=norm / usual)}")
            self._norms.append(norm)
        return sentences

    def _say(self, figure: str, sentence: str) -> list[str]:
        if figure in self._said:
            return []
        self._said.add(figure)
        return [sentence]
