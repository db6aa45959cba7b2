"""Fixes for code that assumes a CUDA device. Upstream: megatron-core 0.16.1."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace

import torch

from mcore_rl.megatron.cpu.hook import CUDA, TORCH
from mcore_rl.megatron.cpu.registry import Fix, fix

_FACTORIES = (
    "arange as_tensor empty empty_strided eye full linspace ones rand randint randn scalar_tensor tensor zeros"
).split()


class _Stream:
    """Replacement for CUDA streams and events. It does nothing, because work on a CPU is already in order."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def _itself(self, *_: object, **__: object) -> _Stream:
        return self

    wait_stream = wait_event = record_event = record = wait = synchronize = _itself


def _nothing(*_: object, **__: object) -> None: ...


def _zero(*_: object, **__: object) -> int:
    return 0


def _null_context(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@fix("cuda_calls")
def _cuda_calls(this: Fix, _: None) -> None:
    """Replace functions of torch.cuda that fail in a CPU build. Schedules synchronize, MoE layers create streams, and
    parameters are allocated on current_device()."""
    stream = _Stream()
    replacements = {
        # "cpu", or "meta" within `with torch.device("meta")`, which builds models without memory.
        "current_device": lambda: torch.get_default_device().type,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "set_device": _nothing,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": _null_context,
        "memory_allocated": _zero,
        "max_memory_allocated": _zero,
        "memory_reserved": _zero,
        "nvtx": SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_null_context),
        # The CPU generator replaces the device's. manual_seed_all is not replaced, because torch.manual_seed calls it.
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed) and None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    for name, replacement in replacements.items():
        this.patch(CUDA, name, replacement)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: object, **kwargs: object) -> torch.Tensor:
        # Pinned memory exists only for copies to a GPU.
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


@fix("device_literals")
def _device_literals(this: Fix, _: None) -> None:
    """Redirect `device="cuda"` literals (in schedules, optimizers, clip_grads and moe_utils) to the CPU, and drop
    pin_memory, which requires a CUDA context."""
    for name in _FACTORIES:
        this.patch(TORCH, name, _on_cpu(getattr(torch, name)))


@fix("tensor_cuda")
def _tensor_cuda(this: Fix, _: None) -> None:
    """Make Tensor.cuda() return the tensor: tied embeddings, rope and the distributed optimizer call it. In a CPU build
    the method always raises, so no other code can depend on it."""
    this.patch(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)


def _renamed(constants: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(
        c.replace("torch.cuda.", "torch.", 1) if isinstance(c, str) and c.startswith("torch.cuda.")
        # The list of `x in ['a', 'b']` is compiled to a constant tuple.
        else _renamed(c) if isinstance(c, tuple)
        else c
        for c in constants
    )  # fmt: skip


def _functions(namespace: dict[str, object], module: ModuleType) -> list[FunctionType]:
    """List all functions and methods defined in `module`."""
    functions: list[FunctionType] = []
    for value in namespace.values():
        if isinstance(value, type) and value.__module__ == module.__name__:
            functions += _functions(dict(vars(value)), module)
        # Look inside classmethods and staticmethods, and inside decorators such as torch.no_grad().
        value = getattr(value, "__func__", value)
        value = getattr(value, "__wrapped__", value)
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            functions.append(value)
    return functions


def _rename_tensor_types(this: Fix, module: ModuleType) -> None:
    """Rename tensor types in Megatron's optimizers, which test Tensor.type() == 'torch.cuda.FloatTensor' and raise
    TypeError for CPU parameters. This changes the constants of their code objects; Tensor.type itself is unchanged."""
    for function in _functions(vars(module), module):
        code = function.__code__
        renamed = _renamed(code.co_consts)
        # Only changed functions are patched, so `without` restores exactly these.
        if renamed != code.co_consts:
            this.patch(function, "__code__", code.replace(co_consts=renamed))


for _module in ("optimizer.optimizer", "optimizer.distrib_optimizer", "optimizer.clip_grads"):
    fix(f"tensor_type_names:{_module}", _module)(_rename_tensor_types)
