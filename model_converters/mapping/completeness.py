"""Check that table, checkpoint and model agree, before any data is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from model_converters.errors import ConversionError, listing
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement, held_shape
from model_converters.mapping.table import BoundRow
from model_converters.mapping.transforms import Shape


def check_complete(
    bound: Sequence[BoundRow],
    hf_names: Iterable[str] | Mapping[str, Shape] | None = None,
    model_names: Iterable[str] | Mapping[str, Shape] | None = None,
    *,
    layout: TrainLayout | None = None,
    rank: int | None = None,
    dropped: Collection[str] = (),
) -> None:
    """Compare the table with all given arguments, in both directions.

    hf_names: tensors of a checkpoint or an engine.
    model_names: canonical names of a model's tensors on rank `rank` of `layout`, or on all its ranks if `rank` is None.
    layout: a single rank by default.
    hf_names and model_names may map names to shapes, which are then compared, too. Shapes in model_names are local and
    require `rank`.
    dropped: HF tensors that are left out of the table on purpose.

    Raises: one ConversionError listing everything that is missing, unknown, claimed twice or of another shape.
    """
    # Collect the problems of all comparisons, so that one message shows them together.
    layout = layout or TrainLayout(1)
    problems: list[str] = []
    hf_shapes = {name: shape for b in bound for name, shape in zip(b.hf, b.row.shapes, strict=True)}
    if hf_names is not None:
        optional = {*dropped, *(name for b in bound for name in b.row.redundant)}
        problems += _compare("HF tensors", hf_shapes, hf_names, optional=optional)
    if model_names is not None:
        problems += _compare("model tensors", _model_shapes(bound, layout, rank), model_names)
    if problems:
        raise ConversionError("the weight table does not fit:\n  " + "\n  ".join(problems))


def _model_shapes(bound: Sequence[BoundRow], layout: TrainLayout, rank: int | None) -> dict[str, Shape]:
    placement = Placement(bound, layout)
    if rank is None:
        # Leave out a tied head that has no tensor of its own. Shapes are unknown: shards may differ between ranks.
        return {b.mcore: () for b in bound if any(True for _ in placement.holdings(b))}
    at = layout.coordinates(rank)
    parts = ((b, placement.part_at(b, at)) for b in bound)
    return {b.mcore: held_shape(b.row, held) for b, held in parts if held is not None}


def _compare(
    what: str,
    wanted: Mapping[str, Shape],
    given: Iterable[str] | Mapping[str, Shape],
    optional: Iterable[str] = (),
) -> list[str]:
    counts = Counter(iter(given))
    known = {*wanted, *optional}
    problems = {
        "missing": [name for name in wanted if name not in counts],
        "unknown": [name for name in counts if name not in known],
        "claimed twice": [name for name, count in counts.items() if count > 1],
    }
    if isinstance(given, Mapping):
        problems["of another shape"] = [
            f"{name} {tuple(given[name])} instead of {shape}"
            for name, shape in wanted.items()
            if name in given and tuple(given[name]) != shape
        ]
    return [f"{len(names)} {what} {kind}: {listing(names)}" for kind, names in problems.items() if names]
