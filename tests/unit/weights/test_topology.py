"""Staging buffers for engine ranks that share a GPU, a host or nothing with trainer ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.weights.transports.topology import Endpoint, StagingBuffer, Topology
from tests.unit.weights.transfer import on_host


def at(locations: str) -> tuple[Endpoint, ...]:
    """Parse `A0 A1 B`: the host of each process, and the number of its GPU if it has one."""
    return tuple(map(on_host, locations.split()))


def buffers(trainers: str, engines: str, size: int = 1, transport: str = "auto") -> list[StagingBuffer]:
    return Topology(at(trainers), at(engines), size, transport).buffers


def test_buffers_shared_gpu_uses_cuda_ipc() -> None:
    assert buffers("A0 A1 B0 B1", "A0 A1 B0 B1", 4) == [StagingBuffer((i,), "cuda_ipc", (i,), i) for i in range(4)]
    # Engines on the same GPUs share buffers.
    assert buffers("A0 A1", "A0 A1 A0 A1", 2) == [StagingBuffer((i, i + 2), "cuda_ipc", (i,), i) for i in range(2)]


def test_buffers_other_gpus_of_host_use_network() -> None:
    """Between GPUs of a node the messages take NVLink, not the host's memory."""
    assert buffers("A0 A1 A2 A3", "A4 A5 A6 A7", 4) == [StagingBuffer((rank,)) for rank in range(4)]
    assert buffers("A0 A1", "A2 A3", 1) == [StagingBuffer((0,)), StagingBuffer((1,))]
    assert buffers("A0 A1", "A0 A2", 2) == [StagingBuffer((0,), "cuda_ipc", (0,), 0), StagingBuffer((1,))]


@pytest.mark.parametrize(
    ("trainers", "engines", "size"),
    [
        ("A0 A1", "A A", 2),  # engine ranks without a GPU
        ("A A", "A2 A3", 2),  # trainer ranks without a GPU
        ("A0 A0", "A2 A3", 2),  # NCCL does not connect two ranks on one GPU
        ("A0 A1", "A2 A2", 2),
    ],
)
def test_buffers_of_host_without_nccl_use_shared_memory(trainers: str, engines: str, size: int) -> None:
    assert buffers(trainers, engines, size) == [
        StagingBuffer((0,), "shared_memory", (0, 1), 0),
        StagingBuffer((1,), "shared_memory", (0, 1), 1),
    ]


def test_buffers_required_shared_memory_between_gpus_is_used() -> None:
    (buffer,) = buffers("A0 A1", "A2 A3", transport="shared_memory")
    assert buffer == StagingBuffer((0, 1), "shared_memory", (0, 1), 0)


def with_nccl(endpoints: tuple[Endpoint, ...], version: str) -> tuple[Endpoint, ...]:
    return tuple(replace(endpoint, nccl=version) for endpoint in endpoints)


@pytest.mark.parametrize(("engines", "transport"), [("A2 A3", "auto"), ("B0 B1", "auto"), ("B0 B1", "network")])
def test_check_versions_different_nccl_names_both_and_remedy(engines: str, transport: str) -> None:
    trainers = with_nccl(at("A0 A1"), "2.29.7")
    Topology(trainers, with_nccl(at(engines), "2.29.7"), 2, transport).check_versions()
    with pytest.raises(ConfigError) as caught:
        Topology(trainers, with_nccl(at(engines), "2.30.7"), 2, transport).check_versions()
    message = str(caught.value)
    for part in ("2.29.7 (trainer rank 0 on A)", "2.30.7 (rollout engine 0, rank 0 on", "nvidia-nccl-cu13"):
        assert part in message


@pytest.mark.parametrize(("engines", "transport"), [("A0 A1", "auto"), ("A2 A3", "shared_memory"), ("B B", "auto")])
def test_check_versions_of_ranks_outside_nccl_may_differ(engines: str, transport: str) -> None:
    trainers, others = with_nccl(at("A0 A1"), "2.29.7"), with_nccl(at(engines), "2.30.7")
    Topology(trainers, others, 2, transport).check_versions()


def test_buffers_host_without_trainers_uses_network() -> None:
    assert buffers("A0 A1", "B0 A0", 1) == [StagingBuffer((0,)), StagingBuffer((1,), "cuda_ipc", (0,), 0)]
    assert buffers("A A", "B B", 1) == [StagingBuffer((0,)), StagingBuffer((1,))]


def test_buffers_required_transport_is_used() -> None:
    for kind, writers in {"network": (), "shared_memory": (0, 1), "cuda_ipc": (0,)}.items():
        (buffer,) = buffers("A0 A1", "A0", transport=kind)
        assert (buffer.kind, buffer.writers) == (kind, writers)


@pytest.mark.parametrize(
    ("trainers", "engines", "transport", "message"),
    [
        ("A0 A1", "A0 A2", "cuda_ipc", r"weights\.transport=cuda_ipc: no trainer rank shares a GPU with .* on A"),
        ("A A", "A", "cuda_ipc", r"weights\.transport=cuda_ipc: .* set it to auto or network"),
        ("A A", "A B", "shared_memory", r"transport=shared_memory: no trainer rank shares memory with .* on B"),
    ],
)
def test_buffers_required_transport_unavailable_names_key(
    trainers: str, engines: str, transport: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        buffers(trainers, engines, transport=transport)


def test_locations_number_hosts_and_gpus() -> None:
    locations = Topology(at("A0 A1 B0"), at("A1 B0 C"), 1).locations
    assert locations.trainer_hosts.tolist() == [0, 0, 1]
    assert locations.engine_hosts.tolist() == [0, 1, 2]
    assert locations.engine_devices[0] == locations.trainer_devices[1]
    assert locations.engine_devices[1] == locations.trainer_devices[2]
    assert locations.engine_devices[2] == -1
    assert len(np.unique(locations.trainer_devices)) == 3


def test_for_engines_subset_keeps_numbers_and_shares_buffers() -> None:
    topology = Topology(at("A B"), at("A B A B C C A B"), 2)
    assert [buffer.readers for buffer in topology.buffers] == [(0, 2, 6), (1, 3, 7), (4,), (5,)]
    fewer = topology.for_engines([1, 2, 3])
    assert [buffer.readers for buffer in fewer.buffers] == [(0, 4), (1, 5), (2,), (3,)]
    assert [fewer.name(member) for member in (1, 2, 4, 7)] == [
        "trainer rank 1 on B",
        "rollout engine 1, rank 0 on A",
        "rollout engine 2, rank 0 on C",
        "rollout engine 3, rank 1 on B",
    ]
    assert topology.for_engines(range(4)).buffers == topology.buffers
