"""GPU memory that processes share through CUDA IPC handles.

The memory comes from cudaMalloc, not from torch's allocator. Its handle is therefore independent of
PYTORCH_CUDA_ALLOC_CONF and of torch's version in the other process, any number of processes can open it, and
torch.cuda.empty_cache() and the memory pools of engines do not touch it. The driver counts the mappings, so killed
processes leave nothing behind.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Protocol

import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.processes.device_memory import gpu_uuid

BLOCK_BYTES = 2 << 20
"""cudaMalloc divides blocks of this size, and a handle always shares a whole block."""
HANDLE_BYTES = 64
_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag that cudaIpcOpenMemHandle accepts


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


_POINTER = ctypes.POINTER(ctypes.c_void_p)
_NUMBER = ctypes.POINTER(ctypes.c_int)
_SIZE = ctypes.POINTER(ctypes.c_size_t)
_ARGUMENTS = {
    "cudaMalloc": [_POINTER, ctypes.c_size_t],
    "cudaFree": [ctypes.c_void_p],
    "cudaMemGetInfo": [_SIZE, _SIZE],
    "cudaIpcGetMemHandle": [ctypes.POINTER(_Handle), ctypes.c_void_p],
    "cudaIpcOpenMemHandle": [_POINTER, _Handle, ctypes.c_uint],
    "cudaIpcCloseMemHandle": [ctypes.c_void_p],
    "cudaRuntimeGetVersion": [_NUMBER],
    "cudaDriverGetVersion": [_NUMBER],
    "cudaGetLastError": [],
}


class CudaRuntime:
    """Calls of the CUDA runtime for the current GPU.

    Raises: WeightSyncError with the runtime's message, in every call.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        library.cudaGetErrorString.argtypes, library.cudaGetErrorString.restype = [ctypes.c_int], ctypes.c_char_p

    @classmethod
    def loaded(cls) -> CudaRuntime:
        """Return the runtime that torch has loaded; a second copy would have its own state.

        Raises: WeightSyncError if torch has loaded none, for example because it was linked statically.
        """
        name = f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
        try:
            # RTLD_NOLOAD finds a loaded library by its SONAME, wherever torch found the file, and never loads another.
            return cls(ctypes.CDLL(name, os.RTLD_NOW | os.RTLD_NOLOAD))
        except OSError:
            raise WeightSyncError(
                f"torch {torch.__version__} has not loaded {name}, which cuda_ipc needs; set "
                "weights.transport=shared_memory"
            ) from None

    @property
    def versions(self) -> str:
        """Versions on which a handle could depend, for messages."""
        runtime, driver = (self._number(name) for name in ("cudaRuntimeGetVersion", "cudaDriverGetVersion"))
        return f"torch {torch.__version__}, CUDA runtime {_dotted(runtime)}, driver for CUDA {_dotted(driver)}"

    def allocate(self, num_bytes: int) -> int:
        """Allocate whole blocks for `num_bytes`. Returns their address.

        Raises: MemoryError if the GPU has too little free memory.
        """
        pointer = ctypes.c_void_p()
        size = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        status = self._status("cudaMalloc", ctypes.byref(pointer), size)
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"cudaMalloc of {size} bytes")
        self._check("cudaMalloc", status)
        return pointer.value or 0

    def free(self, pointer: int) -> None:
        """Free memory of `allocate`. Blocks until the GPU has completed all queued work."""
        self._call("cudaFree", pointer)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def export(self, pointer: int) -> bytes:
        """Return the handle by which other processes of this host open the memory."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Map another process's memory. Returns its address in this process."""
        pointer = ctypes.c_void_p()
        arguments = (ctypes.byref(pointer), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        self._call("cudaIpcOpenMemHandle", *arguments)
        return pointer.value or 0

    def close(self, pointer: int) -> None:
        """Unmap memory of `open`. Call after all queued copies are complete."""
        self._call("cudaIpcCloseMemHandle", pointer)

    def _number(self, name: str) -> int:
        number = ctypes.c_int()
        self._call(name, ctypes.byref(number))
        return number.value

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, self._status(name, *arguments))

    def _status(self, name: str, *arguments: object) -> int:
        status: int = getattr(self._library, name)(*arguments)
        if status:
            # Clear the thread's last error: torch would raise it after a later kernel launch that did not fail.
            self._library.cudaGetLastError()
        return status

    def _check(self, name: str, status: int) -> None:
        if status:
            text = self._library.cudaGetErrorString(status).decode()
            raise WeightSyncError(f"{name}: {text} (CUDA error {status})")


class IpcMemory:
    """GPU memory that this process has allocated or mapped. `release(pointer)` is called once: by `close`, or when
    nothing refers to the object any more."""

    def __init__(self, pointer: int, num_bytes: int, release: Callable[[int], None]) -> None:
        self.pointer = pointer
        self.num_bytes = num_bytes
        self._release = weakref.finalize(self, release, pointer)
        # Not at exit, when the driver releases everything: cudaFree would wait for kernels of NCCL that wait for a
        # lost peer.
        self._release.atexit = False

    def close(self) -> None:
        """Release the memory; further calls do nothing."""
        self._release()


class DeviceArray:
    """The bytes of `memory` for `torch.as_tensor`, which refers to this object as long as a view of the tensor exists.

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    """

    def __init__(self, memory: IpcMemory) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.pointer, False),  # not read-only
            "strides": None,
            "version": 3,
        }


class Gpus(Protocol):
    """GPUs that are visible to this process, by their numbers in this process."""

    @property
    def runtime(self) -> CudaRuntime: ...

    def current(self) -> int: ...

    def uuid(self, number: int) -> str: ...

    def find(self, uuid: str) -> int | None: ...

    def selected(self, number: int) -> AbstractContextManager[object]:
        """Make GPU `number` the current one during the block."""

    def empty_cache(self) -> None:
        """Return unused memory of torch's allocator to the driver."""

    def as_tensor(self, array: DeviceArray, number: int) -> torch.Tensor:
        """Return a tensor of bytes on memory of GPU `number`, without a copy."""


class TorchGpus:
    """GPUs as torch numbers them; implements Gpus."""

    @cached_property
    def runtime(self) -> CudaRuntime:
        return CudaRuntime.loaded()

    def current(self) -> int:
        return torch.cuda.current_device()

    def uuid(self, number: int) -> str:
        return gpu_uuid(number)

    def find(self, uuid: str) -> int | None:
        return next((number for number in range(torch.cuda.device_count()) if self.uuid(number) == uuid), None)

    def selected(self, number: int) -> AbstractContextManager[object]:
        return torch.cuda.device(number)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def as_tensor(self, array: DeviceArray, number: int) -> torch.Tensor:
        # With another device than the memory's, as_tensor would copy.
        tensor = torch.as_tensor(array, device=torch.device("cuda", number))
        assert tensor.data_ptr() == array.memory.pointer
        return tensor


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
