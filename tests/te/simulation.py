"""Simulation of TransformerEngine on the CPU: its real Python code with stand-ins for the C extension, under the real
megatron-core.

Call `install` before anything imports Megatron. MCORE_RL_TE_VERSION selects a version of scripts/contract_packages.py,
by default the newest. Models are then built as on a GPU: TransformerEngine's layer specification, its linear layers
with fused norms, and grouped GEMM. Not tested: the choice of the attention backend (SDPA replaces it), the fused
permutation (Megatron's own replaces it), FP8, CUDA graphs, streams, and the kernels themselves.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any
from unittest.mock import MagicMock

import torch
from contract_packages import TRANSFORMER_ENGINES
from packaging.version import Version

PACKAGES = {package.version: package for package in TRANSFORMER_ENGINES}
CHOICE = "MCORE_RL_TE_VERSION"
VERSION = os.environ.get(CHOICE, max(PACKAGES, key=Version))
FOLDER = PACKAGES[VERSION].folder
_NAME = "transformer_engine"
_FACTORIES = "arange empty empty_like empty_strided full ones tensor zeros".split()


class _View(types.ModuleType):
    """Module with some names replaced; other names come from the real module."""

    def __init__(self, real: types.ModuleType, **names: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(names, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Loader(SourceFileLoader):
    """Loader that executes a module and then replaces its torch by one with a GPU."""

    def exec_module(self, module: types.ModuleType) -> None:
        # While they are loaded, classes and decorators of these modules query devices.
        super().exec_module(module)
        for name, value in list(vars(module).items()):
            if value is torch:
                setattr(module, name, _TORCH)
            elif value is torch.cuda:
                setattr(module, name, _CUDA)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _NAME and not name.startswith(f"{_NAME}."):
            return None
        spec = PathFinder.find_spec(name, path if path is not None else [str(FOLDER)], target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _on_cpu(factory: Callable[..., Any], *args: Any, device: Any = None, **options: Any) -> Any:
    """Call a torch factory. TransformerEngine allocates on cuda by name and by number; other devices, such as meta, are
    kept."""
    if device is not None and (isinstance(device, int) or "cuda" in str(device)):
        device = "cpu"
    return factory(*args, **options) if device is None else factory(*args, device=device, **options)


class _Nothing:
    """Object whose methods do nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def _silent(*_: Any) -> AbstractContextManager[None]:
    return nullcontext()


_PROPERTIES = types.SimpleNamespace(
    major=9, minor=0, multi_processor_count=132, name="NVIDIA H100", total_memory=80 << 30
)
_CUDA = _View(
    torch.cuda,
    is_available=lambda: True,
    current_device=lambda: 0,
    device_count=lambda: 8,
    get_device_properties=lambda *_: _PROPERTIES,
    get_device_capability=lambda *_: (9, 0),
    is_current_stream_capturing=lambda: False,
    synchronize=lambda *_: None,
    device=_silent,
    nvtx=_View(torch.cuda.nvtx, range=_silent, range_push=_silent, range_pop=_silent),
    Stream=_Nothing,
    Event=_Nothing,
    current_stream=lambda *_: _Nothing(),
)
_TORCH = _View(torch, cuda=_CUDA, **{name: partial(_on_cpu, getattr(torch, name)) for name in _FACTORIES})


def is_there() -> bool:
    """Return whether all versions of the package are downloaded."""
    return all(package.folder.is_dir() for package in PACKAGES.values())


def install() -> None:
    """Install the simulation in this process. Cannot be undone; further calls do nothing."""
    if "transformer_engine_torch" in sys.modules:
        return
    assert is_there(), f"{FOLDER} is missing: scripts/setup_contracts.py"
    assert "megatron.core" not in sys.modules, "megatron.core was imported before TransformerEngine"
    from tests.te.extension import Extension
    from tests.te.kernels import KERNELS

    sys.path.append(str(FOLDER))  # its metadata has the version
    sys.meta_path.insert(0, _Finder())
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # disables the search for its library
    _interpret_triton()
    extension = Extension(KERNELS | {"get_cudnn_version": lambda: 91600, "get_num_cublas_streams": lambda: 1})
    sys.modules["transformer_engine_torch"] = extension
    for name in ("onnx", "onnxscript"):  # needed by an unused export function
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
    _show_cuda_tensors()
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch.cpp_extensions as names
    import transformer_engine.pytorch.cpp_extensions.gemm as gemm

    names.__getattr__ = extension.__getattr__  # this module imports all names of the extension
    gemm.get_cublas_workspace = lambda device, ub, grouped: [torch.empty(1)] if grouped else torch.empty(1)
    _attend_on_cpu()
    _permute_without_triton()


def _interpret_triton() -> None:
    """Interpret Triton kernels (the permutations), with the first configuration instead of autotuning."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime.autotuner import Autotuner

    def run(tuner: Any, *args: Any, **options: Any) -> Any:
        return tuner.fn.run(*args, **options, **tuner.configs[0].all_kwargs())

    Autotuner.run = run


def _show_cuda_tensors() -> None:
    """Let all tensors appear to be on a GPU, but only to TransformerEngine's code, which rejects others."""
    real = torch.Tensor.is_cuda

    def is_cuda(tensor: torch.Tensor) -> bool:
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        return caller.startswith(_NAME) or bool(real.__get__(tensor))

    torch.Tensor.is_cuda = property(is_cuda)  # type: ignore[assignment]


def _attend_on_cpu() -> None:
    """Replace TransformerEngine's attention kernels by this project's attention, in Megatron's adapter."""
    from mcore_rl.megatron import cpu

    cpu.install()
    import megatron.core.extensions.transformer_engine as adapter

    from mcore_rl.megatron.model.attention.context import SINGLE_RANK, ContextPart
    from mcore_rl.megatron.model.attention.packed import SDPACoreAttention
    from mcore_rl.resolved import attention, implementation

    assert adapter.HAVE_TE, "megatron does not see the simulated TransformerEngine"

    def attend(
        self: Any, query: Any, key: Any, value: Any, mask: Any, *_: Any, packed_seq_params: Any, **__: Any
    ) -> Any:
        size = self.config.context_parallel_size
        ours = SDPACoreAttention.__new__(SDPACoreAttention)
        torch.nn.Module.__init__(ours)
        ours.context = SINGLE_RANK if size == 1 else ContextPart(self.cp_group.rank(), size, self.cp_group)
        ours.scale = self.unfused_attention.softmax_scale
        earlier = self.window_size[0]
        ours.window = None if earlier < 0 else earlier + 1
        return SDPACoreAttention.forward(ours, query, key, value, None, packed_seq_params)

    adapter.TEDotProductAttention.forward = attend
    implementation.pick = lambda *_: attention.BACKENDS[0]  # supports float32 and any head size
    implementation.check_torch_flash = lambda *_: None


def _permute_without_triton() -> None:
    """Replace TransformerEngine's permutations by Megatron's own: interpreted kernels take a second each and do not
    support bfloat16. test_simulation tests them."""
    from megatron.core.transformer.moe import token_dispatcher

    def unfused(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, fused=False, **options: function(*args, **options)

    for name in ("permute", "unpermute", "sort_chunks_by_idxs"):
        setattr(token_dispatcher, name, unfused(getattr(token_dispatcher, name)))
