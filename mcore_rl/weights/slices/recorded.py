"""Whether an engine's rank keeps what a plan, which knows no engine, would send it."""

from __future__ import annotations

from collections.abc import Mapping

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.needs import Box


def require_planned(recorded: Mapping[str, Box], planned: Mapping[str, Box], rank: int) -> None:
    """`recorded`: by HF name what the engine's rank was seen to take; `planned`: what it is sent.

    Raises: WeightSyncError naming the first tensors that differ.
    """
    names = sorted(name for name in planned.keys() | recorded.keys() if planned.get(name) != recorded.get(name))
    if names:
        both = (f"{name}: {_said(recorded.get(name))}, not {_said(planned.get(name))}" for name in names[:4])
        raise WeightSyncError(
            f"of {len(names)} tensors the engine keeps another part on rank {rank} than planned: {'; '.join(both)}"
        )


def _said(box: Box | None) -> str:
    return "nothing" if box is None else f"{list(box[1])} from {list(box[0])}"
