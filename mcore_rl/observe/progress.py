"""Progress of a run as lines: the start-up log, then one line per step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "val/accuracy", "{:.3f}"),
    ("val loss", "val/loss", "{:.4f}"),
    ("margin", "preference/margin", "{:.3f}"),
    ("length", "response_tokens/mean", "{:.1f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("loss", "actor/loss", "{:.4f}"),
)
_PHASES = ("generate", "reward", "logp", "update", "weight_sync", "validate", "checkpoint")


def start_up_log() -> Callable[[str], None]:
    """Return a function that prints a line with the seconds since this call to the current stderr."""
    stream, started = sys.stderr, time.monotonic()

    def show(line: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {line}", file=stream, flush=True)

    return show


class Progress:
    """Prints one line per finished step to `stream`, by default stderr."""

    def __init__(self, total_steps: int, *, first_step: int = 0, stream: TextIO | None = None) -> None:
        self._total_steps, self._first_step = total_steps, first_step
        self._started = time.monotonic()
        self._stream = stream if stream is not None else sys.stderr

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` has ended. metrics: keys of metrics.jsonl."""
        line = step_line(step, self._total_steps, metrics, seconds_left=self._seconds_left(step))
        print(line, file=self._stream, flush=True)

    def _seconds_left(self, step: int) -> float | None:
        """Estimate from the wall-clock time per step since this process started."""
        done, left = step - self._first_step, self._total_steps - step
        # Steps of earlier processes do not count, because their times are unknown here.
        return (time.monotonic() - self._started) / done * left if done > 0 and left > 0 else None


def step_line(step: int, total_steps: int, metrics: Mapping[str, float], *, seconds_left: float | None = None) -> str:
    """Format as `step 3/60  reward 0.412  entropy 0.311  1.90 s (generate 0.80, update 0.91, ...)  left 1:48`."""
    # Step numbers have equal widths, so that the columns of all lines align.
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    parts += [f"{name} {form.format(metrics[key])}" for name, key, form in _SHOWN if metrics.get(key) is not None]
    phases = [
        f"{phase} {metrics[f'time/{phase}']:.2f}" for phase in _PHASES if metrics.get(f"time/{phase}") is not None
    ]
    if metrics.get("time/step") is not None:
        parts.append(f"{metrics['time/step']:.2f} s" + (f" ({', '.join(phases)})" if phases else ""))
    elif phases:
        parts.append(f"({', '.join(phases)} s)")
    if seconds_left is not None:
        parts.append(f"left {clock(seconds_left)}")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Format seconds as `0:09`, `12:30`, `3:05:00`, `2 d 3:05:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    shown = f"{hour}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{days} d {shown}" if days else shown
