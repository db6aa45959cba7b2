"""A connection that ends, also after an error, leaves no mapping and no memory of its staging buffers."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.errors import ConfigError, PeerLostError, WeightSyncError
from mcore_rl.weights.connection import Connection, TrainerSetup, connect_engine_rank
from mcore_rl.weights.receive import SliceReceiver
from mcore_rl.weights.send import WeightSender
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.transports import segments
from mcore_rl.weights.transports.arrival import Rendezvous
from mcore_rl.weights.transports.segments import SEGMENTS
from model_converters.mapping.layout import TrainLayout
from tests.tiny_models import tiny_fields
from tests.unit.weights.delivery import Tensors, trainer_tensors
from tests.unit.weights.fake_gpus import FakeSegment
from tests.unit.weights.test_slices import random_checkpoint
from tests.unit.weights.test_transfer import CASES, check_update, checkpoint_of, held_by, ignore
from tests.unit.weights.transfer import at_once, connected, fork_server, store, sync_plan

FIELDS = tiny_fields("qwen3_moe", vocab_size=97)


def num_mapped() -> int:
    """Count the mappings of staging buffers in host memory, and of the signals of all staging buffers."""
    gc.collect()  # frames of an expected error refer to views
    return sum("/mcore_rl_" in line for line in Path("/proc/self/maps").read_text().splitlines())


def leave(receiver: SliceReceiver) -> None:
    """End the connection in the middle of an update, or when a sender does so because another engine rank has left."""
    receiver.begin()
    with suppress(PeerLostError):
        for sync_round in range(receiver.num_rounds // 2):
            receiver.receive(sync_round, ignore)
    receiver.close()


def send(sender: WeightSender, held: Tensors) -> None:
    """Send an update that the engines leave. A rank of the first pipeline stage may have sent its part by then."""
    with suppress(PeerLostError):
        sender.send(held)


@pytest.mark.parametrize("outcome", ["updated", "unused", "broken"])
@pytest.mark.parametrize("case", ["two engines read one buffer", "all kinds"])
def test_ended_connection_unmaps_host_memory(case: str, outcome: str) -> None:
    """`processes` still refers to all senders and receivers."""
    plan = sync_plan(*CASES[case])
    owned = 2 * sum(buffer.owner is not None for buffer in plan.topology.buffers)  # memory and signals
    assert num_mapped() == 0
    with connected(plan, store()) as processes:
        assert num_mapped() > owned
        if outcome == "updated":
            check_update(processes, 0)
        if outcome == "broken":
            held = held_by(plan, checkpoint_of(plan, 1))
            calls = [partial(send, sender, own) for sender, own in zip(processes.senders, held, strict=True)]
            at_once([*calls, *(partial(leave, receiver) for receiver in processes.receivers)])
        for receiver in processes.receivers:
            receiver.close()
            receiver.close()
            with pytest.raises(WeightSyncError, match="the receiver is closed"):
                receiver.begin()
        for setup in processes.setups:
            setup.disconnect()
        assert num_mapped() == owned
        for setup in processes.setups:
            setup.close()
            setup.close()
        assert num_mapped() == 0


def test_failed_connection_unmaps_its_buffers() -> None:
    """The engine rank is missing at first, then a trainer rank is."""
    plan, server = sync_plan(*CASES["one host"]), store()
    for generation, missing in enumerate(["engine", "trainer"]):
        setups = [TrainerSetup(plan, rank) for rank in range(2)]
        segments = {number: name for setup in setups for number, name in setup.create_buffers().items()}
        connection = Connection(plan, Rendezvous("127.0.0.1", server.port, generation), segments, 0.3)
        connect: Any = setups[0].connect if missing == "engine" else partial(connect_engine_rank, engine_rank=0)
        with pytest.raises(PeerLostError):
            connect(connection)
        assert num_mapped() == (6 if missing == "engine" else 4)
        for setup in setups:
            setup.disconnect()
        assert num_mapped() == 4
        for setup in setups:
            setup.close()
        assert num_mapped() == 0


def test_buffer_without_room_for_its_signals_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    room = iter([1 << 30, 0])
    monkeypatch.setattr(segments, "_available_bytes", lambda: next(room))
    setup = TrainerSetup(sync_plan(*CASES["one host"]), 0)
    with pytest.raises(ConfigError, match="has room for 0 MiB"):
        setup.create_buffers()
    setup.close()
    assert not list(segments.SHARED_MEMORY.glob(f"{segments.PREFIX}_{os.getpid()}_*"))
    assert num_mapped() == 0


def engine(pipe: Pipe, library: str) -> None:
    """Run an engine rank on the GPU of the trainer rank. Answers with the number of mappings after each command."""
    gpus = FakeSegment.use(library, ["GPU-4"])
    SEGMENTS[True] = FakeSegment
    receiver: Any = None
    while (command := pipe.recv()) is not None:
        if isinstance(command, Connection):
            receiver = connect_engine_rank(command, 0)
        elif command == "leave":
            leave(receiver)
        pipe.send(gpus.library.fake_memories())


@pytest.fixture
def pipe(library: str) -> Iterator[Pipe]:
    """Return the pipe of an engine process."""
    ours, theirs = multiprocessing.Pipe()
    process = fork_server().Process(target=engine, args=(theirs, library), daemon=True)
    process.start()
    yield ours
    process.kill()
    process.join()


def test_gpu_memory_of_broken_updates_is_unmapped_then_freed(
    library: str, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of each generation ends after half of its rounds; one generation exists at a time."""
    gpus = FakeSegment.use(library, ["GPU-4"])
    monkeypatch.setitem(SEGMENTS, True, FakeSegment)
    plan, server = sync_plan(FIELDS, TrainLayout(1), EngineLayout(), "A0 ", "A0 "), store()
    assert [buffer.kind for buffer in plan.topology.buffers] == ["cuda_ipc"]
    held = trainer_tensors(plan.rows, plan.train_layout, 0, random_checkpoint(plan.rows, 1))
    for generation in range(3):
        setup = TrainerSetup(plan, 0)
        segments = setup.create_buffers()
        assert gpus.library.fake_memories() == 1
        connection = Connection(plan, Rendezvous("127.0.0.1", server.port, generation), segments, 60.0)
        pipe.send(connection)
        sender = setup.connect(connection)
        assert pipe.recv() == 1
        setup.unlink()
        pipe.send("leave")
        with pytest.raises(PeerLostError, match="rollout engine 0"):
            sender.send(held)
        assert pipe.recv() == 0
        setup.disconnect()
        assert gpus.library.fake_memories() == 1
        setup.close()
        assert gpus.library.fake_memories() == 0
