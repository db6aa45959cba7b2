"""Measurements of devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one GPU, measured by one process. Units: bytes.

    device: UUID of the GPU.
    used_bytes: memory that is in use, by all processes together.
    reserved_bytes: memory that torch's allocator has reserved in the measuring process.
    """

    device: str
    used_bytes: int
    total_bytes: int
    reserved_bytes: int
