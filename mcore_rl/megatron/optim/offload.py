"""Moves parameters, gradients and optimizer state of a rank between its device and host memory, between phases.

Tensors keep their identity: the storages behind them lose their memory and get it back, so every view (a parameter of
DDP's buffer, a gradient in its bucket, the optimizer's shard of a parameter) is valid again afterwards. What is moved
at one time, in bytes per parameter of a bfloat16 model whose optimizer state lies on d data-parallel ranks:

    params       2         DDP's parameter buffers (parameters themselves without the distributed optimizer)
    grads        4         DDP's gradient buffers: dropped, since every update starts from zero
    optimizer    12 / d    float32 main parameters and Adam's moments (8 / d in float32, whose parameters are the main
                           ones)

On CUDA the host copies are pinned and kept for the next time. On CPU host and device are one memory: only gradients
then save any, the rest behaves as on CUDA. Buffers of modules (rotary tables, expert biases) stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from mcore_rl.config.models import OffloadConfig
from mcore_rl.errors import OffloadedError
from mcore_rl.megatron.optim.host_optimizer import HostOptimizer
from mcore_rl.megatron.optim.main_params import optimizer_parts

PARTS = ("params", "grads", "optimizer")
PIECE_BYTES = 1 << 26
"""Of pinned memory. torch rounds what it pins up to a power of two: whole pieces lose nothing to that."""


class Offloader:
    """The three parts of one rank's state, each on its device or away. `load` and `offload` may be called in any
    order and repeatedly; they move only what is not where it should be.

    While a part is away, torch refuses every operation on its tensors with OffloadedError: a storage without memory
    would be read all the same, from anywhere.

    `chunks` are as wrap_chunks makes them or, without an optimizer, of a model that is not trained.
    `offload` moves only what `settings` name. `span` times the moves.
    """

    def __init__(
        self, chunks: Sequence[Any], optimizer: Any, settings: OffloadConfig, *, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self.span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
        self._tensors: dict[str, Callable[[], Iterable[torch.Tensor]]] = {
            "params": lambda: _parameters(chunks),
            "grads": lambda: _gradients(chunks),
            "optimizer": lambda: _optimizer_state(optimizer),
        }
        self._parts = [part for part in PARTS if getattr(settings, part)]
        self._copies = {part: _HostCopy(piece_bytes) for part in PARTS if part != "grads"}
        self._away: dict[str, _Away] = {}

    @property
    def released_bytes(self) -> int:
        """Device memory that the parts which are away gave up."""
        return sum(away.num_bytes for away in self._away.values())

    def offload(self, parts: Iterable[str] = PARTS) -> int:
        """Sends away those of `parts` that the settings name; returns released_bytes."""
        leaving = [part for part in self._parts if part in parts and part not in self._away]
        if leaving:
            with self.span("offload"):
                for part in leaving:
                    self._send_away(part)
                _return_memory()
        return self.released_bytes

    def load(self, *parts: str) -> None:
        """Brings parts back: parameters and optimizer state bit by bit, gradients as zeros."""
        missing = [part for part in parts if part in self._away]
        if missing:
            with self.span("load"):
                for part in missing:
                    self._bring_back(part)

    def _send_away(self, part: str) -> None:
        storages = self._storages_of(part)
        if not all(storage.resizable() for storage in storages.values()):
            raise OffloadedError(f"{part} cannot leave: Tensor.numpy() was called on one and binds its memory for ever")
        moved = [(storage, storage.nbytes()) for storage in storages.values()]
        if part in self._copies:
            self._copies[part].store(list(storages.values()))
        # Of all parts: a float32 optimizer holds views of the parameters.
        leaving = [tensor for tensor in self._here(PARTS) if tensor.untyped_storage().data_ptr() in storages]
        guarded: list[tuple[torch.Tensor, Any]] = [(tensor, type(tensor)) for tensor in leaving]
        for tensor, kind in guarded:
            tensor.__class__ = _guard_class(part, kind)
        for storage, _ in moved:
            storage.resize_(0)
        self._away[part] = _Away(moved, guarded)

    def _storages_of(self, part: str) -> dict[int, torch.UntypedStorage]:
        """By address; without what belongs to an earlier part."""
        earlier = {tensor.untyped_storage().data_ptr() for tensor in self._here(PARTS[: PARTS.index(part)])}
        storages = [tensor.untyped_storage() for tensor in self._here([part])]
        return {
            storage.data_ptr(): storage
            for storage in storages
            if storage.nbytes() and storage.data_ptr() not in earlier
        }

    def _here(self, parts: Iterable[str]) -> list[torch.Tensor]:
        """The tensors of `parts`, less those that are away with whatever part."""
        away = {id(tensor) for gone in self._away.values() for tensor, _ in gone.guarded}
        return [tensor for part in parts for tensor in self._tensors[part]() if id(tensor) not in away]

    def _bring_back(self, part: str) -> None:
        away = self._away[part]
        for storage, num_bytes in away.storages:
            storage.resize_(num_bytes)
        if part in self._copies:
            self._copies[part].restore([storage for storage, _ in away.storages])
        else:
            for storage, _ in away.storages:
                _bytes_of(storage).zero_()
        for tensor, kind in away.guarded:
            tensor.__class__ = kind
        del self._away[part]


@dataclass(frozen=True)
class _Away:
    """Storages with the bytes that they had, and the tensors over them with their classes."""

    storages: list[tuple[torch.UntypedStorage, int]]
    guarded: list[tuple[torch.Tensor, Any]]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.storages)


class _HostCopy:
    """Storages, one after the other, in host memory that consists of pieces."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._pieces: list[torch.Tensor] = []

    def store(self, storages: Sequence[torch.UntypedStorage]) -> None:
        pinned = torch.cuda.is_available()
        missing = sum(storage.nbytes() for storage in storages) - sum(piece.numel() for piece in self._pieces)
        while missing > 0:
            # Always whole pieces, so that state which grew finds them where it left them.
            self._pieces.append(torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=pinned))
            missing -= self._piece_bytes
        for host, device in self._pairs(storages):
            host.copy_(device, non_blocking=True)
        _wait()

    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        for host, device in self._pairs(storages):
            device.copy_(host, non_blocking=True)
        _wait()
        if not torch.cuda.is_available():
            self._pieces = []  # ordinary memory is had again at once; pinning it takes longer than the copy

    def _pairs(self, storages: Sequence[torch.UntypedStorage]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Equal stretches of host memory and storages."""
        place = 0
        for storage in storages:
            device, done = _bytes_of(storage), 0
            while done < device.numel():
                piece, start = divmod(place, self._piece_bytes)
                length = min(device.numel() - done, self._piece_bytes - start)
                yield self._pieces[piece][start : start + length], device[done : done + length]
                place, done = place + length, done + length


def _parameters(chunks: Sequence[Any]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        yield from chunk.parameters()
        yield from (buffer.param_data for buffer in _buffers(chunk) if buffer.param_data is not None)


def _gradients(chunks: Sequence[Any]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        for buffer in _buffers(chunk):
            yield buffer.grad_data
            yield from (parameter.main_grad for parameter in buffer.params)


def _optimizer_state(optimizer: Any) -> Iterator[torch.Tensor]:
    """Step counts, numbers that torch keeps on the host, are left out; so is state that lies on the host anyway."""
    for part in optimizer_parts(optimizer) if optimizer is not None else []:
        inner = part.optimizer
        if isinstance(inner, HostOptimizer):
            yield from inner.on_device()
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for key, value in state.items() if key != "step" and isinstance(value, torch.Tensor))


def _buffers(chunk: Any) -> list[Any]:
    if not hasattr(chunk, "expert_parallel_buffers"):  # a model that is not trained
        return []
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _return_memory() -> None:
    """To the device, for another process; torch's allocator would keep it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@cache
def _guard_class(part: str, kind: Any) -> type:
    """A class for tensors of `kind` with which torch does nothing but raise."""

    def refuse(cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise OffloadedError(f"{part} lie in host memory (actor.offload.{part}); load them before they are used")

    return type(f"Offloaded{kind.__name__}", (kind,), {"__torch_function__": classmethod(refuse)})
