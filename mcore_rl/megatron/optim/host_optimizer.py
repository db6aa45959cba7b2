"""Adam on the device with optimizer state in host memory: actor.optimizer.cpu_offload.

Float32 main parameters and moments are in host memory (pinned on CUDA). A step processes them piece by piece: it copies
a piece to the device, updates it with the inner optimizer, copies the result into the weights, and copies the state
back. Results are bitwise the same as without offloading. Each step transfers 24 bytes per owned parameter, and the
device holds only one piece of state. For a bfloat16 model, weights (2 bytes per parameter) and gradients (4 bytes)
stay on the device.

Main parameters remain the same tensor objects, because Megatron keeps lists of them; between steps their storage is
empty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from typing import TypedDict

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from mcore_rl.errors import OffloadedError
from mcore_rl.megatron.optim.main_params import MainParameter, finish_copies, main_parameters, parameter_buffers

PIECE_ELEMENTS = 1 << 26
"""Maximum number of parameters on the device at a time, 12 bytes each. A single parameter is not split."""
SLAB_BYTES = 1 << 28
"""Size of pinned allocations. torch rounds pinned allocations up to a power of two, so this size wastes nothing."""
ALIGNMENT = 64
"""Alignment of tensors in a slab, in bytes."""


class ParamGroup(TypedDict, total=False):
    """Entry of torch's `param_groups`. Only optimizers of apex and TransformerEngine have a `step` per group."""

    params: list[torch.Tensor]
    step: torch.Tensor | int


class HostOptimizer:
    """Replacement for the inner optimizer of `part`, a DistributedOptimizer; its step also updates the weights.

    `param_groups` and `state` belong to the inner optimizer; between steps the moments in `state` are host tensors.
    Reading the values of a main parameter raises OffloadedError; use `host_copy`.
    """

    def __init__(self, part: MegatronOptimizer) -> None:
        self._inner = part.optimizer
        # The same objects as in the inner optimizer: schedules change `lr` in these groups.
        self.param_groups: list[ParamGroup] = part.optimizer.param_groups
        self.state = part.optimizer.state
        self._memory = _HostMemory()
        self._owned = {id(owned.main): owned for owned in main_parameters(part)}
        self._host: dict[int, torch.Tensor] = {}
        for owned in self._owned.values():
            if owned.is_copy:
                self._host[id(owned.main)] = self._memory.take(owned.main)
                self._release(owned)
        finish_copies()
        part.optimizer = self
        # The step already copied each piece into the weights; afterwards the device has no main parameters.
        part._copy_main_params_to_model_params = lambda: None

    def host_copy(self, main: torch.Tensor) -> torch.Tensor:
        """Return the host tensor with the values of a main parameter between steps. The next step uses values written
        to it."""
        return self._host[id(main)]

    def on_device(self) -> list[torch.Tensor]:
        """Return the main parameters that are the model's own parameters and stay on the device."""
        return [owned.main for owned in self._owned.values() if not owned.is_copy]

    def pieces(self) -> Iterator[list[torch.Tensor]]:
        """Yield all main parameters in the pieces in which they are moved to the device."""
        for group in self.param_groups:
            yield from _pieces(group["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """Update every main parameter that has a gradient, and the corresponding weights."""
        for group in self.param_groups:
            step_count: torch.Tensor | int | None = None
            for piece in _pieces([main for main in group["params"] if main.grad is not None]):
                step_count = self._step_piece(group, piece)
            if step_count is not None:
                group["step"] = step_count
        finish_copies()

    def _step_piece(self, group: ParamGroup, piece: list[torch.Tensor]) -> torch.Tensor | int | None:
        """Update one piece. Returns the group's new step count if the inner optimizer (apex, TransformerEngine) has
        one.

        These optimizers increment the count in every call, but all pieces belong to one step. Each piece therefore
        starts from the old count.
        """
        owned = [self._owned[id(main)] for main in piece]
        hosts = [self._load(each) for each in owned]
        # Show the inner optimizer a single group that contains only this piece.
        only = group.copy()
        only["params"] = piece
        if "step" in group:
            only["step"] = deepcopy(group["step"])
        self._inner.param_groups = [only]
        try:
            self._inner.step()
        finally:
            self._inner.param_groups = self.param_groups
        for each, host in zip(owned, hosts, strict=True):
            self._store(each, host)
        return only.get("step")

    def _load(self, owned: MainParameter) -> dict[str, torch.Tensor]:
        """Copy the state to the device. Returns the host tensors of the moments by name."""
        main, state = owned.main, self.state.get(owned.main, {})
        hosts = {name: value for name, value in state.items() if name != "step" and torch.is_tensor(value)}
        for name, host in hosts.items():
            state[name] = torch.empty_like(host, device=owned.model.device).copy_(host, non_blocking=True)
        if owned.is_copy:
            host = self._host[id(main)]
            main.__class__ = torch.Tensor
            main.untyped_storage().resize_(host.nbytes)
            main.copy_(host, non_blocking=True)
        return hosts

    def _store(self, owned: MainParameter, hosts: dict[str, torch.Tensor]) -> None:
        main, state = owned.main, self.state[owned.main]
        for name, value in state.items():
            if name == "step" or not torch.is_tensor(value):
                continue
            # The first step creates the moments, so they have no host tensors yet.
            host = hosts[name] if name in hosts else self._memory.take(value)
            state[name] = host.copy_(value, non_blocking=True)
        if owned.is_copy:
            owned.model.detach().view(-1)[owned.start : owned.stop].copy_(main)
            self._release(owned)

    def _release(self, owned: MainParameter) -> None:
        """Copy a main parameter to the host and free its device memory."""
        main = owned.main
        self._host[id(main)].copy_(main.detach(), non_blocking=True)
        # Safe before the copy has finished: the next user of this memory is queued on the same stream.
        main.untyped_storage().resize_(0)
        main.__class__ = _released_class()


@contextlib.contextmanager
def gradients_released(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Return a context in which DDP's gradient buffers have no memory, so that main parameters can be created on the
    device in their place. The gradients are zero afterwards."""
    buffers = [buffer for chunk in chunks for buffer in parameter_buffers(chunk)]
    storages = [(buffer.grad_data.untyped_storage(), buffer.grad_data.untyped_storage().nbytes()) for buffer in buffers]
    for storage, _ in storages:
        storage.resize_(0)
    try:
        yield
    finally:
        for storage, num_bytes in storages:
            storage.resize_(num_bytes)
        for buffer in buffers:
            buffer.grad_data.zero_()


class _HostMemory:
    """Allocator of host tensors in large slabs."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized tensor with the shape and dtype of `like`."""
        num_bytes = like.numel() * like.element_size()
        if self._used + num_bytes > self._slab.numel():
            size = max(SLAB_BYTES, num_bytes) if torch.cuda.is_available() else num_bytes
            self._slab = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            self._used = 0
        part = self._slab[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return part.view(like.dtype).view(like.shape)


def _pieces(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    piece: list[torch.Tensor] = []
    elements = 0
    for parameter in parameters:
        if piece and elements + parameter.numel() > PIECE_ELEMENTS:
            yield piece
            piece, elements = [], 0
        piece.append(parameter)
        elements += parameter.numel()
    if piece:
        yield piece


@cache
def _released_class() -> type:
    """Create the class of main parameters without memory. It allows only access to gradients, shape, dtype, device and
    sizes, which Megatron uses between steps."""
    kinds = (torch.Tensor.grad, torch.Tensor.shape, torch.Tensor.dtype, torch.Tensor.device, torch.Tensor.requires_grad)
    allowed = {accessor for each in kinds for accessor in (each.__get__, each.__set__, each.__delete__)}  # type: ignore[attr-defined]
    allowed |= {torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.size, torch.Tensor.untyped_storage}

    def refuse(
        cls: type,
        function: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if function in allowed:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise OffloadedError("main parameters are in host memory (actor.optimizer.cpu_offload)")

    return type("MainParameterOnHost", (torch.Tensor,), {"__torch_function__": classmethod(refuse)})
