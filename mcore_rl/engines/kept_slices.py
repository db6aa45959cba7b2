"""What of every HF tensor a rank of an engine keeps, and where: recorded from the engine's own loaders, not guessed.

The loaders get stand-ins of the full shape without memory (meta tensors); they cut views of them, and a dispatch mode
sees each view being copied: its offset and strides say which box of the tensor it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.errors import WeightSyncError

Shape = tuple[int, ...]
_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class TensorSpec:
    """An HF tensor that updates bring."""

    name: str
    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class KeptSlice:
    """A box of the HF tensor `name`, and where the parameter of a module has it, in the format of checkpoints: element
    `index` of the box lies at `offset` plus the sum of index times `strides`."""

    name: str
    start: Shape
    size: Shape
    module: str
    parameter: str
    offset: int
    strides: Shape

    @property
    def numel(self) -> int:
        return prod(self.size)


def record(
    model: Any, places: Mapping[int, tuple[str, str]], specs: Iterable[TensorSpec], engine: str
) -> list[KeptSlice]:
    """What `model` takes of these tensors; its parameters stay as they were. `places`: (module, parameter) by
    storage_key.

    Raises: WeightSyncError naming a parameter that a loader computes, instead of copying it.
    """
    recorder = _Recorder(places)
    stand_ins = [(spec.name, recorder.stand_in(spec)) for spec in specs]
    with recorder:
        model.load_weights(iter(stand_ins))
    if recorder.computed:
        raise WeightSyncError(
            f"{engine}'s loaders compute {', '.join(recorder.computed[:8])} from what they are given, so that no "
            "slices of it can be sent"
        )
    return recorder.kept


def parts_of(
    kept: Iterable[KeptSlice], start: Shape, box: torch.Tensor
) -> Iterator[tuple[KeptSlice, int, torch.Tensor]]:
    """What of a box of an HF tensor, whose first element is at `start`, belongs to slices of that tensor: the slice,
    the place in its parameter where the part begins (with the slice's strides), and the part."""
    for each in kept:
        low = tuple(map(max, each.start, start))
        high = tuple(map(min, _end(each.start, each.size), _end(start, tuple(box.shape))))
        if all(first < end for first, end in zip(low, high, strict=True)):
            inside = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            offset = each.offset + sum((a - b) * s for a, b, s in zip(low, each.start, each.strides, strict=True))
            yield each, offset, box[inside]


def storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    """Sees copies out of stand-ins. `places`: (module, parameter) by storage."""

    def __init__(self, places: Mapping[int, tuple[str, str]]) -> None:
        super().__init__()
        self.kept: list[KeptSlice] = []
        self.computed: list[str] = []
        self._places = places
        self._sources: dict[int, tuple[str, torch.Tensor]] = {}

    def stand_in(self, spec: TensorSpec) -> torch.Tensor:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        self._sources[storage_key(tensor)] = spec.name, tensor
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not _COPY or not args[1].is_meta:
            return func(*args, **(kwargs or {}))
        target, view = args[:2]
        if not view.numel():
            return target  # a rank behind the end of the vocabulary
        name, whole = self._sources.get(storage_key(view), ("", None))
        module, parameter = self._places.get(storage_key(target), ("", ""))
        kept = None if whole is None or not parameter else _kept(whole, view, target)
        if kept is None:
            self.computed.append(f"{module}.{parameter}" if parameter else name or "a tensor of its own")
        else:
            self.kept.append(KeptSlice(name, kept[0], kept[1], module, parameter, target.storage_offset(), kept[2]))
        return target


def _kept(whole: torch.Tensor, view: torch.Tensor, target: torch.Tensor) -> tuple[Shape, Shape, Shape] | None:
    """(start, size) of the box of `whole` that `view` is, and the strides of `target` along the box's dims; None where
    it is no box, or the target is no view of one."""
    start = _indices(whole, view.storage_offset())
    last = view.storage_offset() + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    size = tuple(end - first + 1 for first, end in zip(start, _indices(whole, last), strict=True))
    if prod(size) != view.numel() or target.shape != view.shape:
        return None
    strides = []
    for length, stride in zip(size, whole.stride(), strict=True):
        along = [dim for dim, s in enumerate(view.stride()) if s == stride and view.shape[dim] == length]
        if length > 1 and not along:
            return None
        strides.append(target.stride(along[-1]) if length > 1 else 0)
    return start, size, tuple(strides)


def _end(start: Shape, size: Shape) -> Shape:
    return tuple(first + length for first, length in zip(start, size, strict=True))


def _indices(whole: torch.Tensor, offset: int) -> Shape:
    """The element of a contiguous tensor at this offset."""
    indices = []
    for length, stride in zip(whole.shape, whole.stride(), strict=True):
        indices.append(offset // stride % length)
    return tuple(indices)
