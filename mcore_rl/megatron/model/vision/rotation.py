"""Rotary position embedding with sections for time, height and width (mrope)."""

from __future__ import annotations

import torch
import torch.distributed as dist


class SectionedRotation(torch.nn.Module):
    """Rotation of packed rows by three positions per token, in the place of Megatron's MultimodalRotaryEmbedding.

    Megatron's class supports sections in blocks only, and divides its table between context-parallel ranks as if the
    row were one sequence. This table has one row for each token of the whole row, of all context-parallel ranks;
    Megatron's rotation of packed sequences selects each rank's rows.

    inv_freq: radians per position of each pair of elements, float32 [d / 2]; see rotation.set_frequencies.
    """

    def __init__(self, inv_freq: torch.Tensor, sections: list[int], *, interleaved: bool) -> None:
        super().__init__()
        assert sum(sections) == len(inv_freq), "the family's table checks this"
        # Not a buffer, so that neither bfloat16 nor moving the model changes it.
        self.inv_freq = inv_freq
        self._axes = _axes(sections, interleaved).to(inv_freq.device)

    def forward(
        self, positions: torch.Tensor, sections: list[int], cp_group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """Return the angles of each token. `sections` are ignored: the constructor has them.

        Shapes: positions int [3, T], T tokens of the whole row -> float32 [T, 1, 1, d].
        """
        del sections, cp_group
        # [T, d / 2]: each pair has the position of its axis.
        chosen = positions.to(self._axes.device).float()[self._axes].T
        angles = chosen * self.inv_freq
        return torch.cat((angles, angles), -1)[:, None, None]


def _axes(sections: list[int], interleaved: bool) -> torch.Tensor:
    """Return the axis (0: time, 1: height, 2: width) of each pair of elements. Shapes: -> int64 [d / 2]."""
    if not interleaved:
        return torch.arange(3, device="cpu").repeat_interleave(torch.tensor(sections, device="cpu"))
    axes = torch.zeros(sum(sections), dtype=torch.int64, device="cpu")
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
