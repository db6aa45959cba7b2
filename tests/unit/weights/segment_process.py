"""Process that creates or attaches a DeviceSegment, reads and writes it, as another process requests.

Started as a program, not with multiprocessing: the Python of another environment can run it.
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_rl.errors import McoreRLError
from mcore_rl.weights.transports.segments import DeviceSegment
from tests.unit.weights.fake_gpus import FakeSegment

ROOT = Path(__file__).parents[3]
ANSWER = "answer "
"""Start of the lines that are answers. Libraries print other lines."""
CHUNK = 16 << 20


class SegmentCommands:
    """Commands of the process. `seed` numbers a pattern of bytes."""

    def __init__(self, kind: type[DeviceSegment]) -> None:
        self._kind = kind
        self._segment: DeviceSegment

    def create(self, num_bytes: int) -> str:
        self._segment = self._kind.create(num_bytes)
        return self._segment.name

    def attach(self, name: str) -> int:
        self._segment = self._kind.attach(name)
        return self._segment.memory.numel()

    def write(self, seed: int) -> None:
        for part, expected in self._parts(seed):
            part.copy_(expected)
        self._synchronize()

    def differing(self, seed: int) -> int:
        """Count the bytes that differ from the pattern."""
        return sum(int((part != expected).sum()) for part, expected in self._parts(seed))

    def close(self) -> None:
        self._segment.close()

    def versions(self) -> str:
        return self._kind.gpus.runtime.versions

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def has_expandable_segments(self) -> bool:
        torch.zeros(1 << 20, device="cuda")
        return any(each["is_expandable"] for each in torch.cuda.memory_snapshot())

    def copy_rates(self) -> tuple[float, float]:
        """Return the GB/s of copies into own memory, from the segment and from own memory."""
        own, target = (torch.zeros_like(self._segment.memory) for _ in range(2))
        return self._copy_rate(target, self._segment.memory), self._copy_rate(target, own)

    def _copy_rate(self, target: torch.Tensor, source: torch.Tensor) -> float:
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            target.copy_(source)
            self._synchronize()
            seconds.append(time.perf_counter() - start)
        return source.numel() / statistics.median(seconds[1:]) / 1e9

    def _parts(self, seed: int) -> Any:
        memory = self._segment.memory
        for start in range(0, memory.numel(), CHUNK):
            part = memory[start : start + CHUNK]
            index = torch.arange(start, start + part.numel(), device=memory.device)
            yield part, ((index * 31 + seed * 7) % 251).to(torch.uint8)

    def _synchronize(self) -> None:
        if self._segment.memory.is_cuda:
            torch.cuda.synchronize()


class SegmentProcess:
    """A started process, and calls of its commands.

    `library` and `uuids`: fake CUDA runtime and visible GPUs; without them the process uses real GPUs.
    """

    def __init__(
        self, library: str = "", uuids: Sequence[str] = (), python: str = sys.executable, **environment: str
    ) -> None:
        command = [python, "-m", __name__, *([library, *uuids] if library else [])]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, command: str, seconds: float = 90, **arguments: object) -> Any:
        """Return the result of a command. Raises: RuntimeError with the process's error, also if it died."""
        assert self._process.stdin is not None
        print(json.dumps([command, arguments]), file=self._process.stdin, flush=True)
        answer = self._answers.get(timeout=seconds)
        if answer is None:
            raise RuntimeError(f"the process ended with code {self._process.wait()} during {command}; see its stderr")
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def kill(self) -> None:
        """Kill the process, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(json.loads(line.removeprefix(ANSWER)))
        self._answers.put(None)


def main(library: str = "", *uuids: str) -> None:
    kind: type[DeviceSegment] = DeviceSegment
    if library:
        FakeSegment.use(library, uuids)
        kind = FakeSegment
    commands = SegmentCommands(kind)
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            answer = {"result": getattr(commands, command)(**arguments)}
        except McoreRLError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
