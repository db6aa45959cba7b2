"""Pending collectives of a rank, from torch's flight recorder. The driver requests them when a process has died or does
not answer: NCCL ranks wait for a dead peer silently, and the collective shows where they wait."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any


def pending_collectives() -> list[str]:
    """Describe the last unfinished collective of each process group that this process has called, in the order of the
    calls: `all_reduce 12 of tp for 31 s`, where 12 counts the collectives of the group and 31 s have passed since the
    call. Returns [] without torch.distributed."""
    if "torch.distributed" not in sys.modules:
        return []
    from torch._C import _distributed_c10d

    return read_record(json.loads(_distributed_c10d._dump_fr_trace_json()), time.time_ns())


def read_record(record: Mapping[str, Sequence[dict[str, Any]]], now_ns: int) -> list[str]:
    """Read a flight recorder's dump (torch 2.13); `now_ns` is the time since the epoch."""
    newest: dict[str, str] = {}
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
        newest[group] = f"{operation} {sequence} of {group} for {seconds:.0f} s"
    return list(newest.values())
