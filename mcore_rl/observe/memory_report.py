"""Memory of GPUs that engines and trainer ranks share, at four points of the first complete step. It is reported once
per run, next to the numbers of the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rl.errors import McoreRLError
from mcore_rl.types import DeviceMemory, Max, Metric

POINTS = {
    "asleep": "engines asleep",
    "weights_awake": "weights awake",
    "updated": "updated",
    "kv_cache_awake": "KV cache awake",
}
"""Points in the order of a step, with their names in the report:

asleep           engines are asleep, and trainer ranks have not loaded their state yet
weights_awake    the engines' weights are awake, before a sync
updated          after the sync; temporary memory of the update is freed
kv_cache_awake   engines generate; trainer state is offloaded
"""
GIB = 2**30


@dataclass(frozen=True)
class _Measured:
    """Bytes on the fullest GPU, and bytes reserved by torch in the trainer rank that has reserved most."""

    used: int
    trainer: int


@dataclass
class MemoryReport:
    """Measures once per run and records the result.

    measure_trainers, measure_engines: measure the GPU of each rank; None for a rank on a CPU.
    planned: compute the plan's bytes of one GPU, by point, from the total bytes of a GPU.
    record: receives metrics. note: shows a line to the user.
    """

    measure_trainers: Callable[[], Sequence[DeviceMemory | None]]
    measure_engines: Callable[[], Sequence[DeviceMemory | None]]
    planned: Callable[[int], Mapping[str, int]]
    record: Callable[[dict[str, Metric]], None]
    note: Callable[[str], None]
    _measured: dict[str, _Measured] = field(default_factory=dict, init=False)
    _done: bool = field(default=False, init=False)

    def at(self, point: str) -> None:
        """Measure at `point`, unless the run has been reported. The four points must follow each other: a sleep that
        no sync follows is discarded."""
        if self._done:
            return
        names = list(POINTS)
        if point == names[0]:
            self._measured.clear()
        if point != names[len(self._measured)]:
            return
        trainers, engines = self.measure_trainers(), self.measure_engines()
        found = [memory for memory in (*trainers, *engines) if memory is not None]
        if not found:  # on a CPU there is nothing to report
            self._done = True
            return
        reserved = [memory.reserved_bytes for memory in trainers if memory is not None]
        self._measured[point] = _Measured(max(memory.used_bytes for memory in found), max(reserved, default=0))
        if len(self._measured) == len(POINTS):
            self._done = True
            self._report(found)

    def _report(self, found: Sequence[DeviceMemory]) -> None:
        try:
            planned = self.planned(min(memory.total_bytes for memory in found))
        except (McoreRLError, ValueError) as error:  # a run that works needs no plan
            planned = {}
            self.note(f"warning: the memory has no plan to compare it with: {error}")
        metrics: dict[str, Metric] = {}
        parts = []
        for point, name in POINTS.items():
            measured = self._measured[point]
            values = {"used": measured.used, "trainer": measured.trainer}
            values |= {"planned": planned[point]} if point in planned else {}
            metrics |= {f"memory/{point}_{kind}_bytes": Max(value) for kind, value in values.items()}
            plan = f", plan {planned[point] / GIB:.1f}" if point in planned else ""
            parts.append(f"{name} {measured.used / GIB:.1f} (trainer {measured.trainer / GIB:.1f}{plan})")
        self.record(metrics)
        num_devices = len({memory.device for memory in found})
        gpus = "the GPU" if num_devices == 1 else f"the fullest of {num_devices} GPUs"
        self.note(f"memory of {gpus} in GiB: {', '.join(parts)}")
