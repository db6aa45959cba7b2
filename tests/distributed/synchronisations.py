"""Counts where a step would make the host wait for a GPU, on the CPU.

A value that leaves the device (`.item()`, `bool(tensor)`, `.tolist()`), an operation whose result's size depends on
values (`nonzero`, a boolean mask as an index, `unique`, `repeat_interleave` of counts), a copy between host and device
that is not asked to be asynchronous (`.cpu()`, `.to(device)`, `torch.tensor(..., device=...)`) each wait until the
device has done all that was queued before. On a CPU none of them costs anything, so a new one would go unseen.

What cannot be seen here: `copy_` between tensors of two devices, and waits inside of kernels and collectives.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[2]
OURS, MEGATRON = "mcore_rl", "megatron"

_aten = torch.ops.aten
_VALUES = {_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero}
_SIZES = {
    _aten.nonzero,
    _aten.masked_select,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.bincount,
}
_MASKED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_READS = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy", torch.Tensor.cpu: "cpu"}
_FACTORIES = {torch.tensor: "tensor", torch.as_tensor: "as_tensor"}


class Wait(NamedTuple):
    """A place at which the host waits: `file` from the checkout's root, `function` as Python qualifies it, and `kind`,
    what is called there. Both are empty for code of nobody's."""

    file: str
    function: str
    kind: str


class WaitCounter:
    """Within `with`, counts every wait under the innermost function of ours or of megatron's on the stack: `counts`.
    Waits below a function of `exempt`, (beginning of the file, of the qualified name), are left out.
    """

    def __init__(self, exempt: Collection[tuple[str, str]] = ()) -> None:
        self.counts: Counter[Wait] = Counter()
        self._exempt = exempt
        self._modes = (_Operations(self._add), _Calls(self._add))

    def __enter__(self) -> WaitCounter:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def _add(self, kind: str) -> None:
        places = list(_places(sys._getframe(1)))
        if not any(
            file.startswith(first) and name.startswith(then) for file, name in places for first, then in self._exempt
        ):
            file, name = places[0] if places else ("", "")
            self.counts[Wait(file, name, kind)] += 1


def _places(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """File and function of the frames that are ours or megatron's, innermost first."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / OURS):
            yield str(path.relative_to(ROOT)), frame.f_code.co_qualname
        elif "site-packages" in path.parts and MEGATRON in path.parts:
            yield "/".join(path.parts[path.parts.index(MEGATRON) :]), frame.f_code.co_qualname
        frame = frame.f_back


class _Operations(TorchDispatchMode):
    """Sees operations, whoever calls them, in backward passes too."""

    def __init__(self, add: Callable[[str], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = function.overloadpacket
        if packet in _VALUES or packet in _SIZES:
            self._add(packet.__name__)
        elif packet in _MASKED and any(_is_mask(index) for index in args[1]):
            self._add("mask")
        elif packet is _aten.repeat_interleave and (kwargs or {}).get("output_size") is None:
            self._add("repeat_interleave")
        return function(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Sees what is no operation where host and device are one: reading a tensor, and moving it."""

    def __init__(self, add: Callable[[str], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        kind = _READS.get(function)
        if function in _FACTORIES and given.get("device") is not None:
            kind = _FACTORIES[function]
        elif function is torch.Tensor.to and not given.get("non_blocking") and _names_a_device(args[1:], given):
            kind = "to"
        if kind is not None:
            self._add(kind)
        return function(*args, **given)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _names_a_device(args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    return given.get("device") is not None or any(isinstance(value, (str, torch.device)) for value in args)
