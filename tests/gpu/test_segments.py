"""Staging buffers in GPU memory: several processes share one, whatever torch's allocator or torch's version, and its
memory returns, also after processes are killed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_rl.config.rules.engine_support import sglang_python
from tests.unit.weights.segment_process import SegmentProcess

pytestmark = pytest.mark.cuda(only=True)

NUM_BYTES = (512 << 20) + 5
SLACK_BYTES = 64 << 20
"""Tolerance: less than a segment, more than the modules and caches that CUDA loads meanwhile."""
SECONDS_TO_RETURN = 20.0
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

Start = Callable[..., list[SegmentProcess]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes, which use CUDA as soon as they have imported torch."""
    processes: list[SegmentProcess] = []

    def start(count: int, python: str | None = None, **environment: str) -> list[SegmentProcess]:
        started = [SegmentProcess(**({"python": python} if python else {}), **environment) for _ in range(count)]
        processes.extend(started)
        return started

    yield start
    for process in processes:
        process.kill()


@pytest.fixture(autouse=True)
def shared_memory_is_untouched() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(("torch_", "mcore_rl_"))}
    assert not left


def warm_up(processes: list[SegmentProcess]) -> None:
    """Load the kernels of the commands and fill torch's caches, so that they do not count as memory of a segment."""
    for process in processes:
        process.call("create", num_bytes=NUM_BYTES)
        process.call("write", seed=0)
        assert process.call("differing", seed=0) == 0
        process.call("close")
        process.call("empty_cache")


def wait_until_free(process: SegmentProcess, expected: int) -> None:
    deadline = time.monotonic() + SECONDS_TO_RETURN
    while (free := process.call("free_bytes")) < expected - SLACK_BYTES and time.monotonic() < deadline:
        time.sleep(0.2)
    assert free >= expected - SLACK_BYTES, f"{(expected - free) / 2**20:.0f} MiB of GPU memory did not return"


@pytest.mark.parametrize("environment", [{}, EXPANDABLE], ids=["default", "expandable"])
def test_segment_is_shared_and_its_memory_returns(
    environment: dict[str, str], start: Start, report: Callable[[str], None]
) -> None:
    owner, *readers = processes = start(3, **environment)
    for process in processes:
        assert process.call("has_expandable_segments") == bool(environment)
    warm_up(processes)
    before = owner.call("free_bytes")
    name = owner.call("create", num_bytes=NUM_BYTES)
    assert owner.call("free_bytes") < before - NUM_BYTES + SLACK_BYTES
    owner.call("write", seed=1)
    assert [reader.call("attach", name=name) for reader in readers] == [NUM_BYTES] * 2
    assert [reader.call("differing", seed=1) for reader in readers] == [0, 0]
    readers[0].call("write", seed=2)
    for process in processes:
        process.call("empty_cache")
    assert [process.call("differing", seed=2) for process in processes] == [0, 0, 0]
    shared, own = readers[1].call("copy_rates")
    report(f"{owner.call('versions')}: copy from the segment {shared:.0f} GB/s, from own memory {own:.0f} GB/s")
    # Readers close first. The other one and the owner keep their mappings.
    readers[0].call("close")
    assert [process.call("differing", seed=2) for process in (owner, readers[1])] == [0, 0]
    readers[1].call("close")
    owner.call("close")
    for process in processes:
        process.call("close")
        process.call("empty_cache")
    wait_until_free(owner, before)


def test_segment_killed_processes_leave_nothing_behind(start: Start) -> None:
    owner, killed, reader = processes = start(3)
    warm_up(processes)
    before = reader.call("free_bytes")
    name = owner.call("create", num_bytes=NUM_BYTES)
    for process in (killed, reader):
        process.call("attach", name=name)
    killed.kill()
    owner.call("write", seed=3)  # a lost reader disturbs neither the owner nor other readers
    assert reader.call("differing", seed=3) == 0
    owner.kill()
    reader.call("close")
    wait_until_free(reader, before)
    # The GPU is usable, and so is the process that had mapped the memory of the killed owner.
    reader.call("create", num_bytes=NUM_BYTES)
    reader.call("write", seed=4)
    assert reader.call("differing", seed=4) == 0
    reader.call("close")


def test_segment_is_read_by_the_torch_of_sglang(start: Start, report: Callable[[str], None]) -> None:
    if not has_cuda(python := sglang_python()):
        pytest.skip(f"{python} has no torch for CUDA")
    (owner,), (reader,) = start(1), start(1, str(python))
    name = owner.call("create", num_bytes=NUM_BYTES)
    owner.call("write", seed=5)
    assert reader.call("attach", name=name) == NUM_BYTES
    assert reader.call("differing", seed=5) == 0
    reader.call("write", seed=6)
    assert owner.call("differing", seed=6) == 0
    report(f"made with {json.loads(name)['versions']}, read with {reader.call('versions')}")
    reader.call("close")
    owner.call("close")


def has_cuda(python: Path) -> bool:
    code = "import torch; raise SystemExit(torch.version.cuda is None)"
    return python.exists() and subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0
