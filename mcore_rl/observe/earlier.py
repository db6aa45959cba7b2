"""Records of earlier starts about steps that are repeated, moved to earlier/<n>/ of the run directory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mcore_rl.observe.metrics import FILE_NAME, MetricsLog

FOLDER = "earlier"
TIMELINE, TENSORBOARD, ROLLOUTS = "timeline.json", "tensorboard", "rollouts"
_OF_STEP = re.compile(r"(?:.*_)?step_(\d+)\.jsonl")


def set_aside(run_dir: Path, step: int) -> Path | None:
    """Move records of steps after `step` (-1: all) to a new earlier/<n>/ with the layout of the run directory.

    Timeline and TensorBoard files continue after a resume; they are moved only if the run starts from the beginning.

    Returns: the new directory; None if there are no such records.
    """
    metrics = MetricsLog(run_dir)
    rollouts = [path for path in (run_dir / ROLLOUTS).glob("*.jsonl") if _step_of(path) > step]
    if not metrics.holds_after(step) and not rollouts:
        return None
    whole = [path for name in (TIMELINE, TENSORBOARD) if (path := run_dir / name).exists()] if step < 0 else []
    target = _new_folder(run_dir / FOLDER)
    for path in [*whole, *rollouts]:
        kept = target / path.relative_to(run_dir)
        kept.parent.mkdir(exist_ok=True)
        os.rename(path, kept)
    # Must come last: after an interruption, the next start finds these records and moves the rest.
    metrics.move_after(step, target / FILE_NAME)
    return target


def _step_of(path: Path) -> int:
    match = _OF_STEP.fullmatch(path.name)
    return int(match[1]) if match else -1


def _new_folder(parent: Path) -> Path:
    taken = [int(path.name) for path in parent.glob("*") if path.name.isdigit()]
    target = parent / str(max(taken, default=0) + 1)
    target.mkdir(parents=True)
    return target
