"""Output of `python -m model_converters families` and `show`.

The tables of supported and rejected families are generated from each family's Description. The bound weight table in a
layout is printed as text or JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from model_converters.errors import ConversionError
from model_converters.families import FAMILIES
from model_converters.families.parts.family import Description
from model_converters.families.parts.hf_config import HFConfig
from model_converters.families.refusals import REFUSED
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Holding, Placement, local_shape, segments_of
from model_converters.mapping.table import BoundRow

_HEADINGS = ("mcore", "HF", "transform", "axis", "ranks", "local shape", "slice of the HF tensors")
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


def families_text() -> Iterator[str]:
    """Yield the catalogue as text: one line per family, followed by the features it supports and rejects."""
    width = max(map(len, [*FAMILIES, *REFUSED]))
    for model_type, family in sorted(FAMILIES.items()):
        about = family.description
        yield f"{model_type:{width}}  {about.models}"
        yield f"{'':{width}}    supports {about.covers}"
        yield f"{'':{width}}    rejects  {', '.join(_refused(about))}"
        yield f"{'':{width}}    vLLM on CPU: {about.vllm_cpu}"
    for model_type, refusal in sorted(REFUSED.items()):
        yield f"{model_type:{width}}  {refusal.models}: not supported"
        yield from (f"{'':{width}}    missing  {what}" for what in refusal.missing)


def families_markdown() -> str:
    """Return two Markdown tables: supported families, and known families that are rejected."""
    supported = [
        (f"`{name}`", about.models, about.covers, ", ".join(f"`{field}`" for field in _refused(about)), about.vllm_cpu)
        for name, about in ((name, family.description) for name, family in sorted(FAMILIES.items()))
    ]
    refused = [(f"`{name}`", refusal.models, "; ".join(refusal.missing)) for name, refusal in sorted(REFUSED.items())]
    return "\n".join(
        [
            *_table(
                ("model_type", "models", "supported features", "rejected fields, for example", "vLLM on CPU"), supported
            ),
            "",
            *_table(("known, not supported", "models", "missing features"), refused),
        ]
    )


def write_between_markers(path: Path) -> None:
    """Replace the text between the two marker lines of a page by the Markdown tables.

    Raises: ConversionError if the page cannot be read or lacks the markers.
    """
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from error
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConversionError(f"{path} needs the lines {BEGIN} and {END}, in this order")
    path.write_text(f"{before}{BEGIN}\n{families_markdown()}\n{END}{after}", encoding="utf-8")


def _refused(about: Description) -> Iterator[str]:
    # Values in the spelling of config.json: true and null instead of True and None.
    return (f"{field}={json.dumps(value)}" for field, value in about.refused.items())


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "|---" * len(headings) + "|"
    yield from (f"| {' | '.join(cells)} |" for cells in rows)


def rows_json(config: HFConfig, bound: Sequence[BoundRow], layout: TrainLayout) -> dict[str, object]:
    """Return the table as JSON values.

    Keys: model_type, layout, rows. A row has mcore, hf, shapes, dtype, group, transform, axis, dim, exported and
    shards. A shard has ranks, shape (local) and slices (hf, dim, start, length, local_start).
    """
    placement = Placement(bound, layout)
    return {
        "model_type": config["model_type"],
        "layout": asdict(layout) | {"dp": layout.dp, "edp": layout.edp},
        "rows": [_row_json(row, placement) for row in bound],
    }


def _row_json(bound: BoundRow, placement: Placement) -> dict[str, object]:
    row = bound.row
    return {
        "mcore": bound.mcore,
        "hf": list(bound.hf),
        "shapes": [list(shape) for shape in row.shapes],
        "dtype": str(bound.dtype).removeprefix("torch."),
        "group": bound.group,
        "transform": type(row.transform).__name__,
        "axis": row.axis,
        "dim": row.dim,
        "exported": not row.copy_of_embedding,
        "shards": [
            {
                "ranks": list(holding.ranks),
                "shape": list(local_shape(row, holding.held.num_shards)),
                "slices": [
                    {
                        "hf": bound.hf[segment.part],
                        "dim": row.dim,
                        "start": segment.start,
                        "length": segment.length,
                        "local_start": segment.local_start,
                    }
                    for segment in segments_of(row, holding.held.shard, holding.held.num_shards)
                ],
            }
            for holding in placement.holdings(bound)
        ],
    }


def rows_text(config: HFConfig, bound: Sequence[BoundRow], layout: TrainLayout) -> Iterator[str]:
    """Yield text lines with aligned columns, one line per shard of each row."""
    placement = Placement(bound, layout)
    lines: list[tuple[str, ...]] = [_HEADINGS]
    for row in bound:
        holdings = list(placement.holdings(row))
        # A tied head that shares the embedding has no holdings; it still gets a line.
        lines += [_cells(row, holding) for holding in holdings]
        if not holdings:
            lines.append((row.mcore, _joined(row.hf), "tied", "", "none", "", "shares the embedding's tensor"))
    widths = [max(len(cells[column]) for cells in lines) for column in range(len(_HEADINGS))]
    yield f"{config['model_type']}: {len(bound)} rows on {layout.world_size} ranks"
    for cells in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _cells(bound: BoundRow, holding: Holding) -> tuple[str, ...]:
    row = bound.row
    runs: dict[int, list[tuple[int, int]]] = {}
    for part, start, _, length in segments_of(row, holding.held.shard, holding.held.num_shards):
        # Merge adjacent segments, so that a whole tensor is shown as one range.
        known = runs.setdefault(part, [])
        if known and known[-1][1] == start:
            known[-1] = (known[-1][0], start + length)
        else:
            known.append((start, start + length))
    slices = [" ".join(f"{first}:{last}" for first, last in runs[part]) for part in sorted(runs)]
    prefix = "" if holding.held.num_shards == 1 else f"dim {row.dim} "
    return (
        bound.mcore,
        _joined(bound.hf),
        type(row.transform).__name__,
        row.axis if row.axis != "none" else "",
        _ranks(holding.ranks),
        str(list(local_shape(row, holding.held.num_shards))),
        prefix + " | ".join(slices),
    )


def _joined(names: Sequence[str]) -> str:
    """Join names that differ in some dot-separated components: a.b.d and a.c.d become a.{b,c}.d."""
    components = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(same[0] if len(set(same)) == 1 else f"{{{','.join(same)}}}" for same in components)


def _ranks(ranks: range) -> str:
    if len(ranks) == 1:
        return str(ranks[0])
    step = "" if ranks.step == 1 else f" step {ranks.step}"
    return f"{ranks[0]}-{ranks[-1]}{step}"
