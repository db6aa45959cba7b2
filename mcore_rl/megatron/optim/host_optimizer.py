"""Adam on the device with its state in host memory: actor.optimizer.cpu_offload.

Float32 main parameters and moments lie in (on CUDA: pinned) host memory. A step takes them to the device piece by
piece, updates the piece by the optimizer that would update all at once, copies the result into the weights and takes
the state back: the same numbers to the bit, for 24 bytes per owned parameter over the bus and a device that holds one
piece of state. Gradients stay where DDP reduces them. On the device remain, per parameter of a bfloat16 model, its
weight (2 bytes) and gradient (4).

A main parameter keeps its identity, which megatron's lists of parameters rely on: its storage is empty between steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from mcore_rl.errors import OffloadedError
from mcore_rl.megatron.optim.main_params import MainParameter, main_parameters

PIECE_ELEMENTS = 1 << 26
"""On the device at one time, 12 bytes each; a parameter is never cut."""
SLAB_BYTES = 1 << 28
"""Of pinned memory. torch rounds what it pins up to a power of two: whole slabs lose nothing to that."""
ALIGNMENT = 64
"""Bytes: where a tensor starts in a slab."""


class HostOptimizer:
    """Stands in for the inner optimizer of `part`, a DistributedOptimizer, and writes the weights itself as it steps.

    `param_groups` are the inner optimizer's; `state` too, its moments being tensors in host memory between steps.
    Reading the values of a main parameter raises OffloadedError: `host_copy` has them.
    """

    def __init__(self, part: Any) -> None:
        self._inner = part.optimizer
        self._memory = _HostMemory()
        self._owned = {id(owned.main): owned for owned in main_parameters(part)}
        self._host: dict[int, torch.Tensor] = {}
        for owned in self._owned.values():
            if owned.is_copy:
                self._host[id(owned.main)] = self._memory.take(owned.main)
                self._send_away(owned)
        _wait()
        part.optimizer = self
        # A step has done it for each piece; afterwards there is nothing on the device to copy from.
        part._copy_main_params_to_model_params = lambda: None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups  # type: ignore[no-any-return]

    @property
    def state(self) -> Any:
        return self._inner.state

    def host_copy(self, main: torch.Tensor) -> torch.Tensor:
        """Where the values of a main parameter are between steps: written there, they are taken from there."""
        return self._host[id(main)]

    def on_device(self) -> list[torch.Tensor]:
        """The main parameters that are the model's own and stay."""
        return [owned.main for owned in self._owned.values() if not owned.is_copy]

    def pieces(self) -> Iterator[list[torch.Tensor]]:
        """All main parameters, as many at a time as lie on the device together."""
        for group in self.param_groups:
            yield from _pieces(group["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """Updates every main parameter that has a gradient, and the weights that they are copies of."""
        for group in self.param_groups:
            counted: Any = None
            for piece in _pieces([main for main in group["params"] if main.grad is not None]):
                counted = self._step_piece(group, piece)
            if counted is not None:
                group["step"] = counted
        _wait()

    def _step_piece(self, group: dict[str, Any], piece: list[torch.Tensor]) -> Any:
        """Returns the step count of the group, where the inner optimizer (apex, TransformerEngine) keeps one: it counts
        every call, and pieces are one step."""
        owned = [self._owned[id(main)] for main in piece]
        hosts = [self._bring(each) for each in owned]
        whole, only = self._inner.param_groups, {**group, "params": piece}
        if torch.is_tensor(group.get("step")):
            only["step"] = group["step"].clone()
        self._inner.param_groups = [only]
        try:
            self._inner.step()
        finally:
            self._inner.param_groups = whole
        for each, host in zip(owned, hosts, strict=True):
            self._return(each, host)
        return only.get("step")

    def _bring(self, owned: MainParameter) -> dict[str, torch.Tensor]:
        """Takes state to the device; returns the host's moments by name."""
        main, state = owned.main, self._inner.state.get(owned.main, {})
        hosts = {name: value for name, value in state.items() if name != "step" and torch.is_tensor(value)}
        for name, host in hosts.items():
            state[name] = torch.empty_like(host, device=owned.model.device).copy_(host, non_blocking=True)
        if owned.is_copy:
            host = self._host[id(main)]
            main.__class__ = torch.Tensor
            main.untyped_storage().resize_(host.nbytes)
            main.copy_(host, non_blocking=True)
        return hosts

    def _return(self, owned: MainParameter, hosts: dict[str, torch.Tensor]) -> None:
        main, state = owned.main, self._inner.state[owned.main]
        for name, value in state.items():
            if name == "step" or not torch.is_tensor(value):
                continue
            host = hosts[name] if name in hosts else self._memory.take(value)
            state[name] = host.copy_(value, non_blocking=True)
        if owned.is_copy:
            owned.model.detach().view(-1)[owned.start : owned.start + main.numel()].copy_(main)
            self._send_away(owned)

    def _send_away(self, owned: MainParameter) -> None:
        main = owned.main
        self._host[id(main)].copy_(main.detach(), non_blocking=True)
        # The copy is queued on the stream that whoever gets this memory next is queued on too.
        main.untyped_storage().resize_(0)
        main.__class__ = _empty_class()


@contextlib.contextmanager
def gradients_released(chunks: Sequence[Any]) -> Iterator[None]:
    """Without the memory of DDP's gradient buffers, for main parameters while they are made on the device; the
    gradients are zero afterwards."""
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
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
    """Host tensors cut from slabs."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor of the shape and dtype of `like`."""
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


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


@cache
def _empty_class() -> type:
    """For main parameters without memory: megatron may set, read and scale gradients and ask for sizes, no more."""
    about = (torch.Tensor.grad, torch.Tensor.shape, torch.Tensor.dtype, torch.Tensor.device, torch.Tensor.requires_grad)
    allowed = {accessor for each in about for accessor in (each.__get__, each.__set__, each.__delete__)}  # type: ignore[attr-defined]
    allowed |= {torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.size, torch.Tensor.untyped_storage}

    def refuse(cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in allowed:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise OffloadedError("main parameters lie in host memory (actor.optimizer.cpu_offload)")

    return type("MainParameterOnHost", (torch.Tensor,), {"__torch_function__": classmethod(refuse)})
