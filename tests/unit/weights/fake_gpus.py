"""GPUs on host memory for DeviceSegment, over a fake CUDA runtime (fake_cudart.c) that other processes can share."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch

from mcore_rl.weights.transports.ipc_memory import CudaRuntime, DeviceArray, Gpus
from mcore_rl.weights.transports.segments import DeviceSegment

SONAME = "libcudart.so.97"
"""No real runtime has this version."""


class FakeGpus:
    """GPUs `uuids`, whose last characters are their numbers on the machine; implements Gpus."""

    def __init__(self, library: str, uuids: Sequence[str]) -> None:
        self.library = ctypes.CDLL(library)
        self.runtime = CudaRuntime(self.library)
        self._uuids = list(uuids)
        self.emptied = 0

    def current(self) -> int:
        return 0

    def uuid(self, number: int) -> str:
        return self._uuids[number]

    def find(self, uuid: str) -> int | None:
        return self._uuids.index(uuid) if uuid in self._uuids else None

    @contextmanager
    def selected(self, number: int) -> Iterator[None]:
        before = self.library.fake_selected()
        self.library.fake_select(int(self._uuids[number][-1]))
        try:
            yield
        finally:
            self.library.fake_select(before)

    def empty_cache(self) -> None:
        self.emptied += 1

    def as_tensor(self, array: DeviceArray, number: int) -> torch.Tensor:
        memory = (ctypes.c_uint8 * array.memory.num_bytes).from_address(array.memory.pointer)
        memory.array = array  # torch refers to `memory` as long as a view of the tensor exists
        return torch.frombuffer(memory, dtype=torch.uint8)


class FakeSegment(DeviceSegment):
    """DeviceSegment on the GPUs that `use` has set."""

    gpus: ClassVar[Gpus]

    @classmethod
    def use(cls, library: str, uuids: Sequence[str]) -> FakeGpus:
        gpus = FakeGpus(library, uuids)
        cls.gpus = gpus
        return gpus


def compiled(directory: Path) -> str:
    """Compile the fake runtime into `directory`. Returns the library's path.

    Raises: FileNotFoundError without a C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc) on the PATH")
    library = directory / "libfake_cudart.so"
    source = Path(__file__).with_name("fake_cudart.c")
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{SONAME}", "-o", library, source]
    subprocess.run(command, check=True)
    return str(library)
