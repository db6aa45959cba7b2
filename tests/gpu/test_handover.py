"""Weights are copied bit by bit from one process's GPU to another's through shared memory; the rate is reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.gpu.handover import measure

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("bucket_mib", [8.0, 256.0])
def test_what_arrives_is_what_was_sent(bucket_mib: float, device: str, report: Callable[[str], None]) -> None:
    measured = measure(device, layers=2, bucket_mib=bucket_mib, rounds=3, pinned=False)
    assert (measured.num_rounds == 1) == (bucket_mib == 256)
    assert len(measured.arrived) > 50
    assert measured.arrived == measured.sent
    report(f"{measured.rate / 1e9:.2f} GB/s, a copy on the device {measured.copy_rate / 1e9:.2f} GB/s")


@pytest.mark.cuda(only=True)
def test_a_registered_segment_carries_the_same(report: Callable[[str], None]) -> None:
    measured = measure("cuda", layers=2, bucket_mib=8.0, rounds=3, pinned=True)
    assert measured.arrived == measured.sent
    report(f"pinned {measured.rate / 1e9:.2f} GB/s, a copy on the device {measured.copy_rate / 1e9:.2f} GB/s")
