"""Parts of HF tensors that an engine rank keeps, recorded from the engine's own weight loaders.

The loaders get meta tensors of the full shape and copy views of them into parameters. A dispatch mode intercepts these
copies: offset and strides of a view show which box of the HF tensor it is. A copy of a concatenation is a copy of each
of its parts, and a copy of a contiguous clone one of the cloned view.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl.engines.held_weights import Held
from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.slices.shard_map import Box, Boxes
from mcore_rl.weights.slices.stacked_parts import StackedParts, StridedSlice

Shape = tuple[int, ...]
_COPY = torch.ops.aten.copy_.default
_CAT = torch.ops.aten.cat.default
_CLONE = torch.ops.aten.clone.default
_ZERO = torch.ops.aten.zero_.default


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


def kept_boxes(kept: Iterable[KeptSlice]) -> dict[str, Boxes]:
    """Return the parts of each HF tensor that its slices contain. Loaders may copy a tensor in pieces: a convolution
    over queries, keys and values. Pieces that follow each other along one dim are one part."""
    pieces: dict[str, set[Box]] = {}
    for each in kept:
        pieces.setdefault(each.name, set()).add((each.start, each.size))
    return {name: _joined(sorted(boxes)) for name, boxes in pieces.items()}


def _joined(boxes: Sequence[Box]) -> Boxes:
    joined = [boxes[0]]
    for other_start, other_size in boxes[1:]:
        start, size = joined[-1]
        dims = [dim for dim, first in enumerate(start) if first != other_start[dim]]
        same = [dim for dim, length in enumerate(size) if length == other_size[dim]]
        follows = len(dims) == 1 and start[dims[0]] + size[dims[0]] == other_start[dims[0]]
        if follows and {*range(len(size))} - {*dims} <= {*same}:
            dim = dims[0]
            joined[-1] = start, (*size[:dim], size[dim] + other_size[dim], *size[dim + 1 :])
        else:
            joined.append((other_start, other_size))
    return tuple(joined)


class LoadsWeights(Protocol):
    """Method of an engine's model that loads HF tensors by name."""

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]], /) -> object: ...


def outermost_modules(names: Iterable[str], held: Iterable[str] = ()) -> list[str]:
    """Return the distinct names without modules inside another one of them. The model itself has the name "".

    held: all modules with weights. A module inside one of the names must be one of the names too: an engine converts a
    module together with the modules inside it, and must not convert weights that the update lacks a second time.
    """
    chosen = dict.fromkeys(names)
    lacking = sorted(name for name in set(held) - chosen.keys() if any(outer in chosen for outer in _containing(name)))
    assert not lacking, f"the update lacks {lacking[0]}, but contains a module around it: send both with every update"
    return [name for name in chosen if not any(outer in chosen for outer in _containing(name))]


def _containing(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


class SliceLoader(ABC):
    """Loads boxes of HF tensors into the model of an engine rank.

    `record` finds the slices that the rank keeps, `keep` expects them in every later update, and an update is `begin`,
    `put` for each received box, `finish`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules: dict[str, torch.nn.Module] = {}
        self._kept: dict[str, list[KeptSlice]] = {}
        self._frozen: frozenset[str] = frozenset()
        self._missing: Counter[KeptSlice] = Counter()
        """Number of elements that the update in progress still lacks of each slice."""

    def context(self) -> AbstractContextManager[None]:
        """Return the context in which all other methods are called."""
        return torch.no_grad()

    @abstractmethod
    def record(self, whole: Mapping[str, torch.Tensor]) -> list[KeptSlice]:
        """Return the slices that the model keeps of these meta tensors, after discarding an unfinished update. The
        model's parameters are not changed.

        Raises: WeightSyncError naming a parameter that a loader computes instead of copying it.
        """

    @abstractmethod
    def held(self, boxes: Mapping[str, Boxes]) -> Iterator[Held]:
        """Yield the weights that the kernels use. `boxes`: the expected parts of each HF tensor.

        Raises: WeightSyncError for a module whose memory layout is unknown.
        """

    @abstractmethod
    def _parameter_names(self) -> set[str]:
        """Return the names of the parameters that updates contain."""

    @abstractmethod
    def _copy(self, kept: KeptSlice, offset: int, source: torch.Tensor) -> None:
        """Copy a part of a slice to `offset` of its parameter."""

    def keep(self, kept: Sequence[KeptSlice], frozen: Collection[str] = ()) -> None:
        """Expect these slices in every later update, and slices of the HF tensors `frozen` only in whole updates.

        Raises: WeightSyncError for parameters that no tensor contains.
        """
        self._modules, self._kept, self._frozen = dict(self._model.named_modules()), {}, frozenset(frozen)
        for each in kept:
            self._kept.setdefault(each.name, []).append(each)
        without = self._parameter_names() - {f"{each.module}.{each.parameter}" for each in kept}
        tables = ((name, getattr(module, "shard_indices", None)) for name, module in self._modules.items())
        # This rank's part of a vocabulary may be padding only.
        without -= {f"{name}.weight" for name, shard in tables if shard is not None and not shard.num_org_elements}
        if without:
            raise WeightSyncError(f"no tensor of the trainer contains {', '.join(sorted(without))}")

    def begin(self, *, whole: bool = True) -> None:
        """Begin an update, which must contain every slice, or if not `whole` all that are not frozen. Discards an
        unfinished one."""
        expected = [each for name, kept in self._kept.items() if whole or name not in self._frozen for each in kept]
        self._missing = Counter({each: each.numel for each in expected})

    def put(self, name: str, start: Shape, box: torch.Tensor) -> None:
        """Copy the kept parts of a box of the HF tensor `name`. The memory of `box` may be reused afterwards.

        start: indices of the box's first element.
        Raises: WeightSyncError for a part that was already received in this update.
        """
        for each in self._kept.get(name, ()):
            low = tuple(map(max, each.start, start))
            high = tuple(map(min, _end(each.start, each.size), _end(start, tuple(box.shape))))
            if all(first < end for first, end in zip(low, high, strict=True)):
                part = box[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))]
                offset = each.offset + sum((a - b) * s for a, b, s in zip(low, each.start, each.strides, strict=True))
                if part.numel() > self._missing[each]:
                    raise WeightSyncError(f"received a part of {each.name} twice in one update")
                self._missing[each] -= part.numel()
                self._copy(each, offset, part)

    def finish(self) -> None:
        """Finish the update.

        Raises: WeightSyncError naming tensors that were not received completely.
        """
        missing = sorted({each.name for each, numel in self._missing.items() if numel})
        if missing:
            raise WeightSyncError(f"the update lacks all or part of {', '.join(missing[:8])}")


def unstacked(kept: Iterable[KeptSlice], parts: StackedParts) -> list[KeptSlice]:
    """Replace slices of stacked experts by slices of single experts."""
    return [
        KeptSlice(name, start, size, each.module, each.parameter, offset, strides)
        for each in kept
        for name, start, size, strides, offset in parts.slices(
            StridedSlice(each.name, each.start, each.size, each.strides, each.offset)
        )
    ]


def record(
    model: LoadsWeights, places: Mapping[int, tuple[str, str]], whole: Mapping[str, torch.Tensor], engine: str
) -> list[KeptSlice]:
    """Implement SliceLoader.record. `places`: (module, parameter) by storage_key. `engine`: name for messages."""
    recorder = _Recorder(places, whole)
    with torch.no_grad(), recorder:
        model.load_weights(iter(whole.items()))
    if recorder.computed:
        raise WeightSyncError(
            f"{engine}'s loaders compute {', '.join(recorder.computed[:8])} instead of copying it, so slices of it "
            "cannot be sent"
        )
    return list(dict.fromkeys(recorder.kept))  # two models may load a tensor that they share


def storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class _Concatenation:
    """Contiguous meta tensor `whole` that a loader made of `parts`, one behind the other along `dim`."""

    whole: torch.Tensor
    dim: int
    parts: Sequence[torch.Tensor]


class _Recorder(TorchDispatchMode):
    """Intercepts copies from the meta tensors `whole`, and records them instead of executing them."""

    def __init__(self, places: Mapping[int, tuple[str, str]], whole: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.kept: list[KeptSlice] = []
        self.computed: list[str] = []
        self._places = places
        self._sources = {storage_key(tensor): (name, tensor) for name, tensor in whole.items()}
        # Keeps the tensors alive: a key is the address of a storage.
        self._concatenations: dict[int, _Concatenation] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is _COPY and args[1].is_meta:
            self._record_copy(args[0], args[1])
            return args[0]
        # Loaders also view, narrow and initialise tensors.
        result = func(*args, **(kwargs or {}))
        if func is _CAT and isinstance(result, torch.Tensor) and result.is_meta and result.is_contiguous():
            dim = args[1] % result.dim() if len(args) > 1 else 0
            self._concatenations[storage_key(result)] = _Concatenation(result, dim, args[0])
        if func is _CLONE and isinstance(result, torch.Tensor) and result.is_meta and result.is_contiguous():
            self._concatenations[storage_key(result)] = _Concatenation(result, 0, [args[0]])
        if func is _ZERO:
            self._sources.pop(storage_key(args[0]), None)  # its values are no longer the trainer's
        return result

    def _record_copy(self, target: torch.Tensor, view: torch.Tensor) -> None:
        if not view.numel():
            return  # this rank's share of the vocabulary is padding only
        place = self._places.get(storage_key(target))
        # Neither a parameter nor a view of whole tensors: the loader has computed the values.
        kept = None if place is None else self._slices(view, target, place)
        if kept is not None:
            self.kept += kept
        else:
            name, _ = self._sources.get(storage_key(view), ("a temporary tensor", None))
            self.computed.append(name if place is None else ".".join(place))

    def _slices(self, view: torch.Tensor, target: torch.Tensor, place: tuple[str, str]) -> list[KeptSlice] | None:
        """Return the slices that a copy of `view` to `target` contains; None if it contains computed values."""
        key = storage_key(view)
        if key in self._concatenations:
            return self._slices_of_parts(self._concatenations[key], view, target, place)
        name, whole = self._sources.get(key, ("", None))
        kept = None if whole is None else _kept(whole, view, target)
        if kept is None:
            return None
        start, size, strides = kept
        return [KeptSlice(name, start, size, *place, target.storage_offset(), strides)]

    def _slices_of_parts(
        self, source: _Concatenation, view: torch.Tensor, target: torch.Tensor, place: tuple[str, str]
    ) -> list[KeptSlice] | None:
        kept = _kept(source.whole, view, target)
        if kept is None:
            return None
        start, size, strides = kept
        dim, slices, first = source.dim, [], 0
        for part in source.parts:
            # Empty parts may have a single dim.
            length = part.shape[dim] if part.numel() else 0
            low, high = max(start[dim], first), min(start[dim] + size[dim], first + length)
            if low < high:
                index = [slice(begin, begin + count) for begin, count in zip(start, size, strict=True)]
                index[dim] = slice(low - first, high - first)
                inner = part[tuple(index)]
                offset = target.storage_offset() + (low - start[dim]) * strides[dim]
                found = self._slices(inner, target.as_strided(inner.shape, strides, offset), place)
                if found is None:
                    return None
                slices += found
            first += length
        return slices


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
    return tuple(offset // stride % length for length, stride in zip(whole.shape, whole.stride(), strict=True))
