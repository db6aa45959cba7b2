"""Counts, on a CPU, the places where a step would make the host wait for a GPU.

The host waits until the device has finished all queued work if a value leaves the device (`.item()`, `bool(tensor)`,
`.tolist()`), if the size of an operation's result depends on values (`nonzero`, a boolean mask as an index, `unique`,
`repeat_interleave` of counts), or for a synchronous copy between host and device (`.cpu()`, `.to(device)`,
`torch.tensor(..., device=...)`). On a CPU these cost nothing, so a new one would remain unnoticed.

Not detected: `copy_` between tensors of two devices, and waits inside kernels and collectives.
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
    """A place where the host waits: file (relative to the checkout), qualified name of the function, and kind, the
    function called. File and function are empty outside of our code and Megatron."""

    file: str
    function: str
    kind: str


class WaitCounter:
    """Context that counts waits by the innermost function of our code or Megatron on the stack, in `counts`. exempt:
    (prefix of the file, prefix of the qualified name) of functions whose waits are ignored."""

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
    """Yield file and function of the frames of our code or Megatron, innermost first."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / OURS):
            yield str(path.relative_to(ROOT)), frame.f_code.co_qualname
        elif "site-packages" in path.parts and MEGATRON in path.parts:
            yield "/".join(path.parts[path.parts.index(MEGATRON) :]), frame.f_code.co_qualname
        frame = frame.f_back


class _Operations(TorchDispatchMode):
    """Intercepts operations of any caller, also in backward passes."""

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
    """Intercepts calls that are no operations if host and device are the same: reading and moving tensors."""

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
