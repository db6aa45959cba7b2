"""Offloading of a rank's parameters, gradients and optimizer state from device to host memory between phases.

Tensor objects stay the same; only their storages are freed and allocated again. All views (parameters in DDP's buffer,
gradients in their bucket, the optimizer's shards) are valid again after loading. Sizes in bytes per parameter of a
bfloat16 model with optimizer state sharded over d data-parallel ranks:

    params       2         DDP's parameter buffers (the parameters themselves without the distributed optimizer)
    grads        4         DDP's gradient buffers: freed without a copy, since every update starts from zero
    optimizer    12 / d    float32 main parameters and Adam's moments (8 / d in float32, where the parameters are the
                           main parameters)

On CUDA the pinned host copies are kept for reuse. On a CPU, host and device memory are the same, so only offloading
gradients saves memory; otherwise the behavior is the same. Module buffers (rotary tables, expert biases) stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from mcore_rl.config.models import OffloadConfig
from mcore_rl.errors import OffloadedError
from mcore_rl.megatron.model.shards import local_shard
from mcore_rl.megatron.optim.host_optimizer import HostOptimizer
from mcore_rl.megatron.optim.main_params import finish_copies, optimizer_parts, parameter_buffers

PARTS = ("params", "grads", "optimizer")
PIECE_BYTES = 1 << 26
"""Size of pinned allocations. torch rounds pinned allocations up to a power of two, so this size wastes nothing."""


class Offloader:
    """Moves the three parts of a rank's state between device and host. `load` and `offload` may be called repeatedly in
    any order; a part that is already in the right place is not moved.

    While a part is offloaded, every torch operation on its tensors raises OffloadedError; otherwise torch would read
    from invalid memory.

    chunks: from wrap_chunks or, without an optimizer, chunks of a model that is not trained.
    settings: parts that `offload` may move.
    span: timer of the transfers.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None, settings: OffloadConfig
    ) -> None:
        self.span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
        self._tensors: dict[str, Callable[[], Iterable[torch.Tensor]]] = {
            "params": lambda: _parameters(chunks),
            "grads": lambda: _gradients(chunks),
            "optimizer": lambda: _optimizer_state(optimizer),
        }
        self._parts = [part for part in PARTS if getattr(settings, part)]
        self._copies = {part: _HostCopy() for part in PARTS if part != "grads"}
        self._offloaded: dict[str, _Offloaded] = {}

    @property
    def released_bytes(self) -> int:
        """Device memory freed by the offloaded parts."""
        return sum(offloaded.num_bytes for offloaded in self._offloaded.values())

    def offload(self, parts: Iterable[str] = PARTS) -> int:
        """Offload `parts`, except those excluded by the settings, and return freed memory to the device. Returns
        released_bytes."""
        leaving = [part for part in self._parts if part in parts and part not in self._offloaded]
        with self.span("offload") if leaving else nullcontext():
            for part in leaving:
                self._offload_part(part)
            # Also if nothing leaves: torch's allocator keeps the activations of the last pass, and other processes
            # need their memory.
            torch.cuda.empty_cache()
        return self.released_bytes

    def load(self, *parts: str) -> None:
        """Load parts: parameters and optimizer state bitwise unchanged, gradients as zeros."""
        missing = [part for part in parts if part in self._offloaded]
        if missing:
            with self.span("load"):
                for part in missing:
                    self._load_part(part)

    def _offload_part(self, part: str) -> None:
        storages = self._storages_of(part)
        if not all(storage.resizable() for storage in storages.values()):
            raise OffloadedError(f"{part} cannot be offloaded: a call of Tensor.numpy() made a storage non-resizable")
        moved = [(storage, storage.nbytes()) for storage in storages.values()]
        if part in self._copies:
            self._copies[part].store(list(storages.values()))
        # Guard tensors of all parts: the state of a float32 optimizer contains views of the parameters.
        leaving = [tensor for tensor in self._on_device(PARTS) if tensor.untyped_storage().data_ptr() in storages]
        guarded: list[tuple[torch.Tensor, type]] = [(tensor, type(tensor)) for tensor in leaving]
        # Guard first: after resize_ a read would access freed memory.
        for tensor, kind in guarded:
            tensor.__class__ = _guard_class(part, kind)
        for storage, _ in moved:
            storage.resize_(0)
        self._offloaded[part] = _Offloaded(moved, guarded)

    def _storages_of(self, part: str) -> dict[int, torch.UntypedStorage]:
        """Return the storages of `part` by address, without storages that belong to an earlier part."""
        earlier = {tensor.untyped_storage().data_ptr() for tensor in self._on_device(PARTS[: PARTS.index(part)])}
        storages = [tensor.untyped_storage() for tensor in self._on_device([part])]
        return {
            storage.data_ptr(): storage
            for storage in storages
            # Storages of size 0 all have the address 0.
            if storage.nbytes() and storage.data_ptr() not in earlier
        }

    def _on_device(self, parts: Iterable[str]) -> list[torch.Tensor]:
        """Return the tensors of `parts`, without tensors that have been offloaded already."""
        offloaded = {id(tensor) for each in self._offloaded.values() for tensor, _ in each.guarded}
        return [tensor for part in parts for tensor in self._tensors[part]() if id(tensor) not in offloaded]

    def _load_part(self, part: str) -> None:
        offloaded = self._offloaded[part]
        # resize_ allocates new memory for the same storage, so all views stay valid.
        for storage, num_bytes in offloaded.storages:
            storage.resize_(num_bytes)
        if part in self._copies:
            self._copies[part].restore([storage for storage, _ in offloaded.storages])
        else:
            for storage, _ in offloaded.storages:
                _bytes_of(storage).zero_()
        # Last: until here a read would return undefined values.
        for tensor, kind in offloaded.guarded:
            tensor.__class__ = kind
        del self._offloaded[part]


@dataclass(frozen=True)
class _Offloaded:
    """Freed storages with their sizes in bytes, and the guarded tensors with their original classes."""

    storages: list[tuple[torch.UntypedStorage, int]]
    guarded: list[tuple[torch.Tensor, type]]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.storages)


class _HostCopy:
    """Concatenated copies of storages in pieces of host memory."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []

    def store(self, storages: Sequence[torch.UntypedStorage]) -> None:
        pinned = torch.cuda.is_available()
        missing = sum(storage.nbytes() for storage in storages) - sum(piece.numel() for piece in self._pieces)
        while missing > 0:
            # Allocate whole pieces only, so that existing pieces stay in use if the state grows.
            self._pieces.append(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned))
            missing -= PIECE_BYTES
        for host, device in self._pairs(storages):
            host.copy_(device, non_blocking=True)
        finish_copies()

    def restore(self, storages: Sequence[torch.UntypedStorage]) -> None:
        for host, device in self._pairs(storages):
            device.copy_(host, non_blocking=True)
        finish_copies()
        if not torch.cuda.is_available():
            self._pieces = []  # pageable memory is cheap to allocate; pinned memory is kept, as pinning is slow

    def _pairs(self, storages: Sequence[torch.UntypedStorage]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield corresponding ranges of host pieces and storages, as bytes."""
        place = 0
        for storage in storages:
            device, done = _bytes_of(storage), 0
            while done < device.numel():
                piece, start = divmod(place, PIECE_BYTES)
                length = min(device.numel() - done, PIECE_BYTES - start)
                yield self._pieces[piece][start : start + length], device[done : done + length]
                place, done = place + length, done + length


def _parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        for parameter in chunk.parameters():
            shard = local_shard(parameter)
            yield parameter if shard is None else shard
        yield from (buffer.param_data for buffer in parameter_buffers(chunk) if buffer.param_data is not None)


def _gradients(chunks: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        for buffer in parameter_buffers(chunk):
            yield buffer.grad_data
            yield from (parameter.main_grad for parameter in buffer.params)


def _optimizer_state(optimizer: MegatronOptimizer | None) -> Iterator[torch.Tensor]:
    """Yield the device tensors of the optimizer: without step counts, which torch keeps on the host, and without state
    that is in host memory already."""
    for part in optimizer_parts(optimizer) if optimizer is not None else []:
        inner = part.optimizer
        if isinstance(inner, HostOptimizer):
            yield from inner.on_device()
            continue
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for key, value in state.items() if key != "step" and isinstance(value, torch.Tensor))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]


@cache
def _guard_class(part: str, kind: type) -> type:
    """Create the class for offloaded tensors of class `kind`, for which every torch operation raises."""

    def refuse(cls: type, *arguments: object) -> None:
        raise OffloadedError(f"{part} are in host memory (actor.offload.{part}); load them before use")

    return type(f"Offloaded{kind.__name__}", (kind,), {"__torch_function__": classmethod(refuse)})
