"""Parts of HF tensors that an engine rank keeps, recorded from the engine's own weight loaders.

The loaders get meta tensors of the full shape and copy views of them into parameters. A dispatch mode intercepts these
copies: offset and strides of a view show which box of the HF tensor it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.connection import Connection, connect_engine_rank
from mcore_rl.weights.receive import SliceReceiver
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.shard_map import Box, ShardMap
from mcore_rl.weights.verify import require_planned

Shape = tuple[int, ...]
_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of an HF tensor that updates contain."""

    name: str
    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class KeptSlice:
    """Box of the HF tensor `name`, and its place in a module's parameter.

    Element `index` of the box is at `offset + sum(index * strides)` of the parameter, in the checkpoint format (before
    the engine repacks it for its kernels).
    """

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


@dataclass(frozen=True)
class ConnectedRank:
    """Engine rank that is connected to a weight sync.

    boxes: the part of each HF tensor that the plan sends to the rank.
    kept: the slices that the rank keeps.
    """

    receiver: SliceReceiver
    boxes: Mapping[str, Box]
    kept: Sequence[KeptSlice]


def connect_rank(
    connection: Connection,
    layout: EngineLayout,
    rank: int,
    first_rank: int,
    record_kept: Callable[[list[TensorSpec]], list[KeptSlice]],
) -> ConnectedRank:
    """Connect rank `rank` of an engine with `layout` to the sync and record the parts of tensors that it keeps.

    first_rank: number of the engine's first rank among the ranks of all engines.
    Collective: all processes of the sync.
    Raises: WeightSyncError if this rank keeps other parts of tensors than the plan sends.
    """
    plan = connection.plan
    if layout != plan.engine_layout:
        raise WeightSyncError(f"the engine's layout is {layout}, but the sync was planned for {plan.engine_layout}")
    receiver = connect_engine_rank(connection, first_rank + rank)
    shard_map = ShardMap(plan.rows, layout)
    boxes = shard_map.boxes(rank)
    specs = [
        TensorSpec(name, bound.dtype, shape)
        for bound in shard_map.rows
        for name, shape in zip(bound.hf, bound.row.shapes, strict=True)
    ]
    kept = record_kept(specs)
    require_planned({each.name: (each.start, each.size) for each in kept}, boxes, rank)
    return ConnectedRank(receiver, boxes, kept)


class PendingSlices:
    """Kept slices of a rank and the number of elements that the update in progress still lacks of each."""

    def __init__(self, kept: Iterable[KeptSlice]) -> None:
        self._by_tensor: dict[str, list[KeptSlice]] = {}
        for each in kept:
            self._by_tensor.setdefault(each.name, []).append(each)
        self.missing: Counter[KeptSlice] = Counter()

    def begin(self) -> None:
        """Begin an update, which must contain every slice."""
        self.missing = Counter({each: each.numel for kept in self._by_tensor.values() for each in kept})

    def parts(self, name: str, start: Shape, box: torch.Tensor) -> Iterator[tuple[KeptSlice, int, torch.Tensor]]:
        """Intersect a received box of the HF tensor `name` with the kept slices, and count the parts as received.

        start: indices of the box's first element.
        Yields the slice, the offset of the part in the slice's parameter (its strides are the slice's), and the part.
        Raises: WeightSyncError for a part that was already received in this update.
        """
        for each in self._by_tensor.get(name, ()):
            low = tuple(map(max, each.start, start))
            high = tuple(map(min, _end(each.start, each.size), _end(start, tuple(box.shape))))
            if all(first < end for first, end in zip(low, high, strict=True)):
                part = box[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))]
                offset = each.offset + sum((a - b) * s for a, b, s in zip(low, each.start, each.strides, strict=True))
                if part.numel() > self.missing[each]:
                    raise WeightSyncError(f"received a part of {each.name} twice in one update")
                self.missing[each] -= part.numel()
                yield each, offset, part

    def require_complete(self) -> None:
        """Raise WeightSyncError naming tensors that were not received completely."""
        missing = sorted({each.name for each, numel in self.missing.items() if numel})
        if missing:
            raise WeightSyncError(f"the update lacks all or part of {', '.join(missing[:8])}")


class LoadsWeights(Protocol):
    """Model of an engine."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]], /) -> object: ...


def record(
    model: LoadsWeights, places: Mapping[int, tuple[str, str]], specs: Iterable[TensorSpec], engine: str
) -> list[KeptSlice]:
    """Record the slices that `model` keeps of these tensors. Its parameters are not changed.

    places: (module, parameter) by storage_key.
    engine: name for messages.
    Raises: WeightSyncError naming a parameter that a loader computes instead of copying it.
    """
    recorder = _Recorder(places)
    stand_ins = [(spec.name, recorder.stand_in(spec)) for spec in specs]
    with recorder:
        model.load_weights(iter(stand_ins))
    if recorder.computed:
        raise WeightSyncError(
            f"{engine}'s loaders compute {', '.join(recorder.computed[:8])} instead of copying it, so slices of it "
            "cannot be sent"
        )
    return recorder.kept


def storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    """Intercepts copies from stand-ins, and records them instead of executing them."""

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
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[torch.Tensor, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        # Only copies from stand-ins are intercepted; loaders also view, narrow and initialise tensors.
        if func is not _COPY or not args[1].is_meta:
            return func(*args, **(kwargs or {}))
        target, view = args[:2]
        if not view.numel():
            return target  # this rank's share of the vocabulary is padding only
        name, whole = self._sources.get(storage_key(view), ("", None))
        module, parameter = self._places.get(storage_key(target), ("", ""))
        # Not a view of a stand-in, or not into a parameter: the loader has computed the values.
        kept = None if whole is None or not parameter else _kept(whole, view, target)
        if kept is None:
            self.computed.append(f"{module}.{parameter}" if parameter else name or "a temporary tensor")
        else:
            self.kept.append(KeptSlice(name, kept[0], kept[1], module, parameter, target.storage_offset(), kept[2]))
        return target


def _kept(whole: torch.Tensor, view: torch.Tensor, target: torch.Tensor) -> tuple[Shape, Shape, Shape] | None:
    """Return start and size of the box of `whole` that `view` covers, and the strides of `target` along its dims.

    None if the view is not a box, or if its dims cannot be identified by their strides.
    """
    start = _indices(whole, view.storage_offset())
    last = view.storage_offset() + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True))
    # First and last element span the box; a view with gaps or repeats has another number of elements.
    size = tuple(end - first + 1 for first, end in zip(start, _indices(whole, last), strict=True))
    if prod(size) != view.numel() or target.shape != view.shape:
        return None
    strides = []
    for length, stride in zip(size, whole.stride(), strict=True):
        # The dim of the view that walks along this dim of the whole tensor has the same stride and length.
        along = [dim for dim, s in enumerate(view.stride()) if s == stride and view.shape[dim] == length]
        # A dim of length 1 cannot be identified by its stride and needs none.
        if length > 1 and not along:
            return None
        strides.append(target.stride(along[-1]) if length > 1 else 0)
    return start, size, tuple(strides)


def _end(start: Shape, size: Shape) -> Shape:
    return tuple(first + length for first, length in zip(start, size, strict=True))


def _indices(whole: torch.Tensor, offset: int) -> Shape:
    """Return the indices of the element of a contiguous tensor at this offset."""
    indices = []
    for length, stride in zip(whole.shape, whole.stride(), strict=True):
        indices.append(offset // stride % length)
    return tuple(indices)
