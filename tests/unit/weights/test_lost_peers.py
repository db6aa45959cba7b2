"""A process that dies or stops during an update: all others end soon, and their errors name it."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

import pytest
import torch

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.connection import Connection, TrainerSetup, connect_engine_rank
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.arrival import Rendezvous
from model_converters.mapping.layout import TrainLayout
from tests.selection import on_demand_unless
from tests.tiny_models import tiny_fields
from tests.unit.weights.delivery import trainer_tensors
from tests.unit.weights.test_slices import random_checkpoint
from tests.unit.weights.transfer import fork_server, store, sync_plan

TIMEOUT_SECONDS = {signal.SIGSTOP: 3.0, signal.SIGKILL: 120.0}
"""Timeout of the sync. A stopped process is detected only by the timeout, a dead one at once."""
SECONDS_TO_END = 12.0
MODEL, TWO_RANKS = tiny_fields("qwen3_moe", vocab_size=97), (TrainLayout(2, ep=2), EngineLayout(tp=2))
PLANS = {
    "whole": sync_plan(MODEL, *TWO_RANKS, "AB", "AB"),
    "delta": sync_plan(MODEL, *TWO_RANKS, "AB", "AB", delta=True),
}
"""Each engine rank shares a host with one trainer rank, which relays the messages of the other."""
NAMES = ["trainer rank 0 on A", "trainer rank 1 on B", "rollout engine 0, rank 0 on A", "rollout engine 0, rank 1 on B"]


class CountedTensors(Mapping[str, torch.Tensor]):
    """Tensors that call `on_access(n)` before the n-th access."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], on_access: Callable[[int], None]) -> None:
        self._tensors, self._on_access, self._count = tensors, on_access, 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self._on_access(self._count)
        self._count += 1
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def process(pipe: Pipe, member: int, plan: SyncPlan, victim: int, kind: signal.Signals, share: float) -> None:
    """Run one member of the sync. The victim sends itself the signal after `share` of the last update: the first one,
    or with weights.delta the second one, which sends differences only."""
    num_trainers = len(plan.topology.trainers)
    if member < num_trainers:
        setup = TrainerSetup(plan, member)
        pipe.send(setup.create_buffers())
        sender = setup.connect(pipe.recv())
        work = sum(len(message.slices) for of_round in plan.outgoing(member).values() for message in of_round)
    else:
        pipe.send({})
        receiver = connect_engine_rank(pipe.recv(), member - num_trainers)
        work = receiver.num_rounds

    def on_access(last: bool, done: int) -> None:
        if last and member == victim and done >= int(share * (work - 1)):
            os.kill(os.getpid(), kind)

    pipe.send("connected")
    if pipe.recv() == "unlink" and member < num_trainers:
        setup.unlink()
    try:
        for last in [False, True] if plan.topology.delta else [True]:
            if member < num_trainers:
                held = trainer_tensors(plan.rows, plan.train_layout, member, random_checkpoint(plan.rows, 1))
                sender.send(CountedTensors(held, partial(on_access, last)))
            else:
                receiver.begin()
                for sync_round in range(receiver.num_rounds):
                    on_access(last, sync_round)
                    receiver.receive(sync_round, lambda *_: None)
                receiver.finish()
        pipe.send("done")
    except PeerLostError as error:
        pipe.send(str(error))
    pipe.recv()  # stay alive: survivors must not have to wait for each other either


def started(plan: SyncPlan, *arguments: object) -> list[tuple[Any, Pipe]]:
    context = fork_server()
    members = []
    for member in range(len(plan.topology.trainers) + len(plan.topology.engines)):
        ours, theirs = context.Pipe()
        child = context.Process(target=process, args=(theirs, member, plan, *arguments), daemon=True)
        child.start()
        theirs.close()
        members.append((child, ours))
    return members


def received(member: int, pipe: Pipe, seconds: float) -> Any:
    assert pipe.poll(seconds), f"{NAMES[member]} still waits"
    return pipe.recv()


CASES = list(itertools.product(PLANS, (signal.SIGKILL, signal.SIGSTOP), (0, 3), (0.0, 0.5, 1.0)))
USUAL = (
    ("whole", signal.SIGKILL, 0, 0.5),
    ("whole", signal.SIGKILL, 3, 0.0),
    ("whole", signal.SIGSTOP, 0, 0.0),
    ("whole", signal.SIGSTOP, 3, 0.5),
    ("delta", signal.SIGKILL, 0, 0.0),
    ("delta", signal.SIGKILL, 3, 0.5),
    ("delta", signal.SIGSTOP, 0, 0.5),
    ("delta", signal.SIGSTOP, 3, 1.0),
)
"""Every kind of message with every signal to a trainer and an engine rank, in alternating places of the update."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("messages", "kind", "victim", "share"),
    [pytest.param(*case, marks=on_demand_unless(case in USUAL)) for case in CASES],
)
def test_update_lost_member_ends_all_others_and_is_named(
    messages: str, kind: signal.Signals, victim: int, share: float
) -> None:
    rendezvous, plan = store(), PLANS[messages]
    members = started(plan, victim, kind, share)
    try:
        segments = {number: name for member, (_, pipe) in enumerate(members)
                    for number, name in received(member, pipe, 60).items()}  # fmt: skip
        for _, pipe in members:
            pipe.send(Connection(plan, Rendezvous("127.0.0.1", rendezvous.port, 0), segments, TIMEOUT_SECONDS[kind]))
        for member, (_, pipe) in enumerate(members):
            assert received(member, pipe, 60) == "connected"
        for _, pipe in members:
            pipe.send("unlink")
        others = [(member, pipe) for member, (_, pipe) in enumerate(members) if member != victim]
        outcomes = [received(member, pipe, SECONDS_TO_END) for member, pipe in others]
    finally:
        for child, _ in members:
            child.kill()
    if share < 1:  # at the end all others may be done; then only the driver misses the victim's acknowledgement
        assert "done" not in outcomes
        assert any(NAMES[victim] in each for each in outcomes), outcomes
