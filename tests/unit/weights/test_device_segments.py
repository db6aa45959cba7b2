"""Staging buffers in GPU memory, over a fake CUDA runtime: processes that share one, failed calls, and release."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator

import pytest
import torch

from mcore_rl.errors import ConfigError, WeightSyncError
from mcore_rl.weights.transports.ipc_memory import CudaRuntime
from tests.unit.weights.fake_gpus import FakeGpus, FakeSegment
from tests.unit.weights.segment_process import SegmentProcess

MIB = 1 << 20


@pytest.fixture
def gpus(library: str) -> Iterator[FakeGpus]:
    """Two GPUs in this process. Fail the test if memory or an error of the runtime is left."""
    gpus = FakeSegment.use(library, ["GPU-4", "GPU-5"])
    yield gpus
    gc.collect()  # tracebacks of expected errors refer to segments
    assert gpus.library.fake_memories() == 0
    assert gpus.library.fake_last_error() == 0


@pytest.fixture(scope="module")
def readers(library: str) -> Iterator[list[SegmentProcess]]:
    """Two readers. The second one has other GPU numbers."""
    processes = [SegmentProcess(library, ["GPU-4"]), SegmentProcess(library, ["GPU-5", "GPU-4"])]
    yield processes
    for process in processes:
        process.kill()


def test_device_segment_two_readers_share_memory(gpus: FakeGpus, readers: list[SegmentProcess]) -> None:
    owner = FakeSegment.create(3 * MIB + 5)
    assert [reader.call("attach", name=owner.name) for reader in readers] == [3 * MIB + 5] * 2
    for writer in range(2):
        readers[writer].call("write", seed=writer)
        assert readers[1 - writer].call("differing", seed=writer) == 0
    owner.memory.fill_(251)  # in no pattern
    assert [reader.call("differing", seed=0) for reader in readers] == [3 * MIB + 5] * 2
    for process in readers:
        process.call("close")
        process.call("close")
    owner.close()


def test_device_segment_of_invisible_gpu_is_refused(gpus: FakeGpus, readers: list[SegmentProcess]) -> None:
    FakeSegment.use(gpus.library._name, ["GPU-5"])
    owner = FakeSegment.create(1)
    with pytest.raises(RuntimeError, match=r"WeightSyncError: .* is on GPU-5, which is not visible"):
        readers[0].call("attach", name=owner.name)
    assert readers[1].call("attach", name=owner.name) == 1
    readers[1].call("close")
    owner.close()


def test_device_segment_own_handle_names_call_and_versions(gpus: FakeGpus) -> None:
    owner = FakeSegment.create(10)
    versions = f"torch {torch.__version__}, CUDA runtime 13.0, driver for CUDA 13.1"
    with pytest.raises(WeightSyncError, match=r"cudaIpcOpenMemHandle: invalid device context \(CUDA") as failed:
        FakeSegment.attach(owner.name)
    assert str(failed.value).count(versions) == 2  # of both sides
    owner.close()


def test_device_segment_other_format_names_both_sides(gpus: FakeGpus) -> None:
    owner = FakeSegment.create(10)
    name = json.dumps({**json.loads(owner.name), "format": 7, "versions": "torch 3"})
    with pytest.raises(WeightSyncError, match=r"format 7 \(made with torch 3\), but .* format 1 \(torch 2.*checkout"):
        FakeSegment.attach(name)
    owner.close()


def test_device_segment_failed_creation_frees_memory(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.library.fake_fail(b"cudaIpcGetMemHandle", 1, 1)
    with pytest.raises(WeightSyncError, match="cudaIpcGetMemHandle: invalid argument") as failed:
        FakeSegment.create(10)
    assert gpus.library.fake_memories() == 0, failed  # although the traceback refers to the memory's objects

    def fail(*_: object) -> torch.Tensor:
        raise TypeError("no tensor")

    monkeypatch.setattr(gpus, "as_tensor", fail)
    with pytest.raises(TypeError, match="no tensor") as failed_view:
        FakeSegment.create(10)
    assert gpus.library.fake_memories() == 0, failed_view


def test_device_segment_full_gpu_empties_cache_then_names_keys(gpus: FakeGpus) -> None:
    gpus.library.fake_fail(b"cudaMalloc", 2, 1)
    FakeSegment.create(10).close()
    assert gpus.emptied == 1
    gpus.library.fake_fail(b"cudaMalloc", 2, 2)
    with pytest.raises(ConfigError, match=r"GPU-4 has room for 3 MiB, not for 5 MiB of .*bucket_mib"):
        FakeSegment.create(5 * MIB)


def test_device_segment_close_waits_for_views(gpus: FakeGpus) -> None:
    segment = FakeSegment.create(10)
    view = segment.memory[2:4]
    with pytest.raises(WeightSyncError, match="still in use"):
        segment.close()
    view.fill_(3)
    assert view.tolist() == [3, 3]
    del view
    segment.close()
    segment.close()
    assert gpus.library.fake_memories() == 0


def test_device_segment_memory_lives_as_long_as_views(gpus: FakeGpus) -> None:
    view = FakeSegment.create(10).memory[5:]
    assert gpus.library.fake_memories() == 1
    view.fill_(1)
    del view
    assert gpus.library.fake_memories() == 0


def test_device_segment_failed_free_is_raised(gpus: FakeGpus) -> None:
    segment = FakeSegment.create(10)
    gpus.library.fake_fail(b"cudaFree", 1, 1)
    with pytest.raises(WeightSyncError, match="cudaFree: invalid argument"):
        segment.close()


def test_cuda_runtime_is_found_only_if_loaded(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSegment.use(library, ["GPU-4"])  # loads libcudart.so.97 from a path that no search finds
    monkeypatch.setattr(torch.version, "cuda", "97.1")
    assert "CUDA runtime 13.0" in CudaRuntime.loaded().versions
    monkeypatch.setattr(torch.version, "cuda", "98.0")
    with pytest.raises(WeightSyncError, match=r"has not loaded libcudart.so.98, .* weights.transport=shared_memory"):
        CudaRuntime.loaded()
