"""Pending collectives of a rank, from torch's flight recorder. The driver requests them when a process has died or does
not answer: NCCL ranks wait for a dead peer silently, and the collective shows where they wait."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Collective:
    """Last unfinished collective of a process group that a rank has called. `number` counts the collectives of the
    group; `seconds` have passed since the call."""

    group: str
    name: str
    number: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} {self.number} of {self.group} for {self.seconds:.0f} s"


def pending_collectives() -> list[Collective]:
    """Return the pending collectives of this process, in the order of the calls; [] without torch.distributed."""
    if "torch.distributed" not in sys.modules:
        return []
    from torch._C import _distributed_c10d

    return read_record(json.loads(_distributed_c10d._dump_fr_trace_json()), time.time_ns())


def read_record(record: Mapping[str, Sequence[dict[str, Any]]], now_ns: int) -> list[Collective]:
    """Read a flight recorder's dump (torch 2.13); `now_ns` is the time since the epoch."""
    newest: dict[str, Collective] = {}
    for entry in record.get("entries", []):
        number, name = entry["process_group"]
        group = name if name not in ("", "undefined") else f"group {number}"
        if entry["retired"]:
            continue
        seconds = (now_ns - int(entry["time_created_ns"])) / 1e9
        operation = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
        # Sends and receives have a counter of their own.
        sequence = int(entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"])
        # Entries are in the order of the calls, so the last one of a group stays.
        newest[group] = Collective(group, operation, sequence, seconds)
    return list(newest.values())
