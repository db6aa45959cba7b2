"""Horizontal bands of the screen, and their heights on a low terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table


@dataclass
class Band:
    """Panels side by side.

    min_rows: rows with borders to which a low terminal reduces the band.
    """

    panels: Sequence[Panel]
    min_rows: int

    def renderable(self) -> RenderableType:
        """Return the panels; the first of two gets 3/5 of the width."""
        if len(self.panels) == 1:
            return self.panels[0]
        pair = Table.grid(expand=True)
        pair.add_column(ratio=3)
        pair.add_column(ratio=2)
        pair.add_row(*self.panels)
        return pair


def fit_rows(bands: Sequence[Band], console: Console, rows: int) -> None:
    """Reduce bands, the last one first, until all of them have `rows` together or none can be reduced further."""
    heights = [len(console.render_lines(band.renderable(), pad=False)) for band in bands]
    excess = sum(heights) - rows
    for band, height in zip(reversed(bands), reversed(heights), strict=True):
        cut = min(excess, height - band.min_rows)
        if cut > 0:
            excess -= cut
            for panel in band.panels:
                panel.height = height - cut
