"""The recorder finds the parts of HF tensors that loaders copy, directly or through concatenations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from mcore_rl.engines.kept_slices import KeptSlice, kept_boxes, outermost_modules, record, storage_key
from mcore_rl.errors import WeightSyncError

SHAPES = {"q": (4, 6), "k": (2, 6), "v": (3, 6)}
Load = Callable[[dict[str, torch.Tensor], torch.Tensor], object]


class Model:
    """One parameter of module `layer`, which `load` fills from q [4, 6], k [2, 6] and v [3, 6]."""

    def __init__(self, shape: tuple[int, ...], load: Load) -> None:
        self.weight = torch.full(shape, -1.0)
        self._load = load

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]], /) -> object:
        return self._load(dict(weights), self.weight)


def recorded(shape: tuple[int, ...], load: Load) -> list[KeptSlice]:
    """Record `load`, and check that the copied slices equal the parameter that `load` fills."""
    model = Model(shape, load)
    whole = {name: torch.empty(size, device="meta") for name, size in SHAPES.items()}
    kept = record(model, {storage_key(model.weight): ("layer", "weight")}, whole, "The engine")
    assert (model.weight == -1).all()  # recording changes nothing
    generator = torch.Generator().manual_seed(0)
    filled = {name: torch.rand(size, generator=generator) for name, size in SHAPES.items()}
    expected = Model(shape, load)
    expected.load_weights(iter(filled.items()))
    for each in kept:
        box = filled[each.name][tuple(slice(a, a + n) for a, n in zip(each.start, each.size, strict=True))]
        model.weight.as_strided(each.size, each.strides, each.offset).copy_(box)
    assert torch.equal(model.weight, expected.weight)
    return kept


LOADS: dict[str, tuple[tuple[int, ...], Load, list[str]]] = {
    "copy": ((4, 6), lambda w, p: p.copy_(w["q"]), ["q"]),
    "concatenated rows": ((6, 6), lambda w, p: p.copy_(torch.cat([w["q"], w["k"]])), ["q", "k"]),
    "columns": ((2, 9), lambda w, p: p.copy_(torch.cat([w["k"], w["v"].t()[:2]], dim=-1)), ["k", "v"]),
    "narrowed": ((3, 6), lambda w, p: p.copy_(torch.cat([w["q"], w["k"], w["v"]]).narrow(0, 3, 3)), ["q", "k"]),
    "a middle part only": ((2, 2), lambda w, p: p.copy_(torch.cat([w["q"], w["k"]])[4:, 1:3]), ["k"]),
    "transposed": ((6, 6), lambda w, p: p.copy_(torch.cat([w["q"], w["k"]]).t()), ["q", "k"]),
    "part of parts": ((4, 6), lambda w, p: p.copy_(torch.cat([w["q"][1:3], w["v"][:2]])), ["q", "v"]),
    "nested": (
        (5, 6), lambda w, p: p.copy_(torch.cat([torch.cat([w["q"], w["k"]])[2:5], w["v"][:2]])), ["q", "k", "v"]
    ),
    "one row": ((1, 6), lambda w, p: p.copy_(torch.cat([w["q"], w["k"]])[4:5]), ["k"]),
    "into a part": ((8, 9), lambda w, p: p[1:7, 2:8].copy_(torch.cat([w["q"], w["k"]])), ["q", "k"]),
    "a contiguous clone": ((3, 4), lambda w, p: p.copy_(w["q"][:, 2:5].t().contiguous()), ["q"]),
    "with an empty part": ((4, 6), lambda w, p: p.copy_(torch.cat([w["q"][:0], w["q"]])), ["q"]),
}  # fmt: skip


@pytest.mark.parametrize("case", LOADS)
def test_record_copies_of_parts_are_found(case: str) -> None:
    shape, load, names = LOADS[case]
    assert [each.name for each in recorded(shape, load)] == names


COMPUTED: dict[str, tuple[tuple[int, ...], Load]] = {
    "a computed tensor": ((4, 6), lambda w, p: p.copy_(w["q"] * 2)),
    "a computed part": ((6, 6), lambda w, p: p.copy_(torch.cat([w["q"], w["k"] + 1]))),
    "a part of zeros": ((6, 6), lambda w, p: p.copy_(torch.cat([w["q"], torch.zeros(2, 6, device="meta")]))),
    "a computed concatenation": ((6, 6), lambda w, p: p.copy_(torch.cat([w["q"], w["k"]]).neg())),
    "a tensor set to zero": ((4, 6), lambda w, p: p.copy_(w["q"].zero_())),
    "rows with gaps": ((3, 6), lambda w, p: p.copy_(torch.cat([w["q"], w["k"]])[::2])),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_record_computed_values_name_the_parameter(case: str) -> None:
    with pytest.raises(WeightSyncError, match=r"The engine's loaders compute layer\.weight instead of copying it"):
        recorded(*COMPUTED[case])


def test_record_computed_part_outside_the_copy_is_ignored() -> None:
    kept = recorded((4, 6), lambda w, p: p.copy_(torch.cat([w["q"], w["k"] + 1])[:4]))
    assert [(each.name, each.start, each.size) for each in kept] == [("q", (0, 0), (4, 6))]


def _slices(*pieces: tuple[tuple[int, int], tuple[int, int]]) -> list[KeptSlice]:
    return [KeptSlice("conv", start, size, "module", "weight", 0, (1, 1)) for start, size in pieces]


def test_kept_boxes_pieces_along_one_dim_are_one_box() -> None:
    pieces = [((4, 0), (4, 3)), ((0, 0), (2, 3)), ((2, 0), (2, 3)), ((0, 0), (2, 3))]
    assert kept_boxes(_slices(*pieces)) == {"conv": (((0, 0), (8, 3)),)}


@pytest.mark.parametrize(
    "pieces",
    [
        [((0, 0), (2, 3)), ((3, 0), (2, 3))],  # a gap
        [((0, 0), (2, 3)), ((1, 0), (2, 3))],  # an overlap
        [((0, 0), (2, 3)), ((2, 0), (2, 2))],  # another width
        [((0, 0), (2, 3)), ((2, 3), (2, 3))],  # along two dims
    ],
)
def test_kept_boxes_other_pieces_stay_separate(pieces: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    assert kept_boxes(_slices(*pieces)) == {"conv": tuple(pieces)}


@pytest.mark.parametrize(
    ("names", "outermost"),
    [
        (["a.b", "a", "a.b.c", "a"], ["a"]),
        (["a.b", "a.bc", "a.b.c.d"], ["a.b", "a.bc"]),
        (["a.b", ""], [""]),
        ([], []),
    ],
)
def test_outermost_modules_contain_every_module_once(names: list[str], outermost: list[str]) -> None:
    assert outermost_modules(names) == outermost


def test_outermost_modules_reject_a_frozen_module_inside_a_trained_one() -> None:
    assert outermost_modules(["a", "a.b"], ["a", "a.b", "c"]) == ["a"]
    with pytest.raises(AssertionError, match=r"^the update lacks a\.b\.c, but contains a module around it"):
        outermost_modules(["a", "a.b"], ["a", "a.b", "a.b.c", "c"])
