"""Checks of export plans, and local shapes of all ranks in one pass over the table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement, TensorPlan, local_shape
from model_converters.mapping.table import BoundRow
from model_converters.mapping.transforms import Shape


def assert_tiled(bound: Sequence[BoundRow], plans: Sequence[TensorPlan]) -> None:
    """Check that the plans contain every HF tensor of the table once, and tile it exactly once."""
    assert sorted(plan.hf_name for plan in plans) == sorted({name for row in bound for name in row.hf})
    assert tiling_problems(plans) == []


def tiling_problems(plans: Iterable[TensorPlan]) -> list[str]:
    """Return one line per range of an HF tensor that is covered by no piece or by more than one."""
    problems = []
    for plan in plans:
        # A tiling is checked along one dimension: pieces are complete in all others.
        dims = {piece.dim for piece in plan.pieces}
        if len(dims) != 1:
            problems.append(
                f"{plan.hf_name}: {'no pieces' if not dims else f'pieces along several dims {sorted(dims)}'}"
            )
            continue
        dim = dims.pop()
        length = plan.shape[dim] if plan.shape else 1
        # Sweep over the pieces in order; `reached` is the end of the part covered so far.
        reached = 0
        for piece in sorted(plan.pieces, key=lambda piece: (piece.start, piece.length)):
            if piece.start > reached:
                problems.append(f"{plan.hf_name}: [{reached}, {piece.start}) of dim {dim} is untiled")
            if piece.start < reached:
                end = min(reached, piece.start + piece.length)
                problems.append(f"{plan.hf_name}: [{piece.start}, {end}) of dim {dim} is claimed twice, by {piece}")
            reached = max(reached, piece.start + piece.length)
        if reached != length:
            extent = (
                f"[{reached}, {length}) of dim {dim} is untiled" if reached < length else f"dim {dim} ends at {length}"
            )
            problems.append(f"{plan.hf_name}: {extent}")
    return problems


def local_shapes_by_rank(bound: Sequence[BoundRow], layout: TrainLayout) -> list[dict[str, Shape]]:
    """Return local_shapes of every rank, in one pass over the table.

    Raises: LayoutError listing everything that the layout does not divide.
    """
    placement = Placement(bound, layout)
    shapes_by_rank: list[dict[str, Shape]] = [{} for _ in range(layout.world_size)]
    for row in bound:
        for holding in placement.holdings(row):
            shape = local_shape(row.row, holding.held.num_shards)
            for rank in holding.ranks:
                shapes_by_rank[rank][row.mcore] = shape
    return shapes_by_rank
