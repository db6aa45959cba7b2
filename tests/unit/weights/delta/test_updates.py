"""Updates with weights.delta through real sockets: engines receive the same bits as from whole messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import cast

import pytest
import torch
import torch.distributed as dist

from mcore_rl.errors import McoreRLError, WeightSyncError
from mcore_rl.weights.delta.copies import FrameBytes, HeldCopies, SentCopies
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.messages import Message, Slice
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.network import NetworkReceiver
from model_converters.mapping.layout import TrainLayout
from tests.unit.weights import test_nccl as nccl_tests
from tests.unit.weights import transfer
from tests.unit.weights.delivery import Taken, Tensors
from tests.unit.weights.nccl_model import Gpus
from tests.unit.weights.test_transfer import CASES, check_update, checkpoint_of, drain, held_by
from tests.unit.weights.transfer import SHORT_TIMEOUT_SECONDS, Processes, connected, sync_plan, update

STAGES = TrainLayout(4, tp=2, pp=2)
REMOTE = [case for case, (*_, trainers, engines) in CASES.items() if len({*trainers, *engines}) > 1]
SPECIAL = torch.tensor(
    [0x7F800001, 0x7FC12345, -0x3FEDCC, -(2**31), 0, 1, -(2**31) + 1, 0x7F800000], dtype=torch.int32
).view(torch.float32)
"""NaNs with payloads, zeros of both signs, denormals, infinity."""
_generation = iter(range(10**6))


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return transfer.store()


def plan_of(case: str, delta: bool, dtype: torch.dtype = torch.float32, num_slots: int = 2) -> SyncPlan:
    return replace(sync_plan(*CASES[case], delta=delta, num_slots=num_slots), dtype=dtype)


def bits(taken: list[Taken]) -> list[dict[str, list[tuple[tuple[int, ...], list[int]]]]]:
    """Return the received boxes, comparable bit for bit."""
    return [
        {
            name: sorted((start, box.contiguous().view(torch.uint8).flatten().tolist()) for start, box in boxes)
            for name, boxes in of_rank.items()
        }
        for of_rank in taken
    ]


def crossing_bytes(plan: SyncPlan) -> int:
    """Return the bytes of all messages between hosts."""
    ranks = range(len(plan.topology.trainers))
    messages = (each for rank in ranks for of_round in plan.outgoing(rank).values() for each in of_round)
    return sum(each.num_bytes for each in messages if plan.topology.sends_delta(each.receiver, each.sender))


def sent_bytes(processes: Processes) -> FrameBytes:
    return sum((sender.delta_bytes for sender in processes.senders), FrameBytes())


def one_element(tensors: Tensors) -> None:
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] += 1


def nothing(tensors: Tensors) -> None: ...


def everything(tensors: Tensors) -> None:
    for tensor in tensors.values():
        tensor.neg_()


def few_elements(tensors: Tensors) -> None:
    chance = random.Random(7)
    for tensor in tensors.values():
        flat = tensor.view(-1)
        for at in chance.sample(range(len(flat)), max(1, len(flat) // 50)):
            flat[at] = SPECIAL[chance.randrange(len(SPECIAL))]


def one_tensor(tensors: Tensors) -> None:
    tensors["model.norm.weight"].mul_(3)


EDITS: list[Callable[[Tensors], None]] = [
    one_element, nothing, few_elements, few_elements, everything, one_tensor, everything, one_element
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", REMOTE)
def test_delta_updates_equal_whole_updates(store: dist.TCPStore, case: str, dtype: torch.dtype) -> None:
    plans = [plan_of(case, delta, dtype) for delta in (False, True)]
    with ExitStack() as stack:
        whole, delta = (stack.enter_context(connected(plan, store, next(_generation))) for plan in plans)
        checkpoint = checkpoint_of(plans[0], 0)
        for edit in (nothing, *EDITS):
            edit(checkpoint)
            held = held_by(plans[0], checkpoint)
            expected, received = (update(processes, held) for processes in (whole, delta))
            assert bits(received[0]) == bits(expected[0])
            assert received[1] == expected[1]
        assert sent_bytes(whole) == FrameBytes()
        counted = sent_bytes(delta)
        assert counted.content == crossing_bytes(plans[1])
        assert counted.sent <= counted.content // 20


def test_delta_bytes_follow_the_changes(store: dist.TCPStore) -> None:
    plan = plan_of("engine elsewhere", delta=True)
    with connected(plan, store, next(_generation)) as processes:
        checkpoint, sent = checkpoint_of(plan, 1), []
        for edit in (nothing, nothing, one_element, everything):
            edit(checkpoint)
            update(processes, held_by(plan, checkpoint))
            sent.append(sent_bytes(processes).sent)
        content = sent_bytes(processes).content
        # Every message has one piece: a header of 64 bytes and a count of 4.
        headers = sum(len(messages) for rank in range(2) for messages in plan.outgoing(rank).values()) * (64 + 4)
        whole, word = content + headers, sent[2] - headers
        assert sent == [whole, headers, headers + word, whole]
        assert word in (1 + 4, 1 + 2 + 4)  # the gap and the element


def test_delta_after_a_broken_update_is_exact_in_a_new_connection(store: dist.TCPStore) -> None:
    plan = plan_of("all kinds", delta=True)
    with connected(plan, store, next(_generation), SHORT_TIMEOUT_SECONDS) as processes:
        check_update(processes, 5)
        held = held_by(plan, checkpoint_of(plan, 6))
        del held[2]["decoder.final_layernorm.weight"]  # near the end of the update
        calls = [partial(sender.send, own) for sender, own in zip(processes.senders, held, strict=True)]
        calls += [partial(drain, receiver) for receiver in processes.receivers]
        with pytest.raises(McoreRLError):
            transfer.at_once(calls)
    with connected(plan, store, next(_generation)) as processes:
        for seed in (6, 6, 7):
            check_update(processes, seed)


def test_sent_copies_ignore_the_bytes_between_slices() -> None:
    """They are left from other messages in the same slot."""
    slices = [Slice(name, (5,), torch.bfloat16, 0, 0, 5, name, 0, offset) for name, offset in (("a", 0), ("b", 64))]
    message, copies = Message(0, 0, 0, tuple(slices)), SentCopies()
    whole = copies.frame(message, torch.full((128,), 7, dtype=torch.uint8))
    memory = torch.full((128,), 7, dtype=torch.uint8)
    memory[10:64] = 9
    assert len(copies.frame(message, memory)) == len(whole) - 128


@pytest.mark.parametrize("num_slots", [1, 3])
def test_delta_random_updates_arrive_exactly(store: dist.TCPStore, num_slots: int) -> None:
    with connected(plan_of("all kinds", True, num_slots=num_slots), store, next(_generation)) as processes:
        for seed in (0, 1, 1, 2):
            check_update(processes, seed)


def test_delta_new_connection_starts_with_whole_messages(store: dist.TCPStore) -> None:
    plan = plan_of("all kinds", delta=True)
    for _ in range(2):
        with connected(plan, store, next(_generation)) as processes:
            whole = []
            for _ in range(2):
                check_update(processes, 3)
                counted = sent_bytes(processes)
                whole.append(counted.sent > counted.content)
            assert whole == [True, False]


def copies_of(processes: Processes) -> tuple[SentCopies, HeldCopies]:
    """Return the copies of a sender and a receiver of "engine elsewhere"."""
    return processes.senders[0]._copies, cast(NetworkReceiver, processes.receivers[0]._messages)._copies


def test_delta_lost_update_is_refused(store: dist.TCPStore) -> None:
    plan = plan_of("engine elsewhere", delta=True)
    with connected(plan, store, next(_generation), SHORT_TIMEOUT_SECONDS) as processes:
        check_update(processes, 3)
        sent, _ = copies_of(processes)
        next(iter(sent._copies.values())).version += 1  # as if a frame had been sent, but not applied
        with pytest.raises(WeightSyncError, match=r"trainer rank 0 on A, bucket .* based on version 2, but version 1"):
            check_update(processes, 4)


def test_delta_damaged_copy_is_detected_in_the_next_update(store: dist.TCPStore) -> None:
    plan = plan_of("engine elsewhere", delta=True)
    with connected(plan, store, next(_generation), SHORT_TIMEOUT_SECONDS) as processes:
        check_update(processes, 3)
        _, held = copies_of(processes)
        next(iter(held._copies.values())).memory[9] ^= 1
        with pytest.raises(WeightSyncError, match=r"trainer rank 0 on A, bucket .* differ from the sender's"):
            check_update(processes, 3)


def test_delta_damaged_copy_of_a_relay_is_detected(store: dist.TCPStore) -> None:
    plan = plan_of("an engine on each host", delta=True)
    with connected(plan, store, next(_generation), SHORT_TIMEOUT_SECONDS) as processes:
        check_update(processes, 3)
        [relay] = processes.senders[1]._relays
        next(iter(relay._copies._copies.values())).memory[9] ^= 1
        held = held_by(plan, checkpoint_of(plan, 3))
        sending = [partial(sender.send, own) for sender, own in zip(processes.senders, held, strict=True)]
        readers = [partial(drain, receiver) for receiver in processes.receivers]
        with pytest.raises(WeightSyncError, match=r"trainer rank 0 on A, bucket .* differ from the sender's"):
            transfer.at_once([sending[1], sending[0], *readers])


def test_delta_messages_within_a_host_are_sent_whole(store: dist.TCPStore) -> None:
    layouts = TrainLayout(2, tp=2), EngineLayout(tp=2)
    for hosts, transport in (("AA", "auto"), ("AA", "network")):
        plan = sync_plan(CASES["one host"][0], *layouts, hosts, hosts, transport=transport, delta=True)
        assert crossing_bytes(plan) == 0
        with connected(plan, store, next(_generation)) as processes:
            check_update(processes, 5)
            check_update(processes, 5)
            assert sent_bytes(processes) == FrameBytes()


MIXED = {
    "an engine on each host, stages on both": (STAGES, EngineLayout(), "A0 A1 B0 B1", "A0 B0"),
    "an engine on a GPU of its own, stages on both": (STAGES, EngineLayout(), "A0 A1 B0 B1", "A2"),
}
"""Each staging buffer receives messages from the other GPU of its host and from the other host."""


@pytest.mark.parametrize("case", [*nccl_tests.CASES, *MIXED])
def test_delta_between_gpus_of_two_hosts_uses_host_memory(gpus: list[Gpus], store: dist.TCPStore, case: str) -> None:
    """Messages between GPUs of one host still use NCCL."""
    arguments = MIXED.get(case) or nccl_tests.CASES[case]
    plan = sync_plan(nccl_tests.EXPERTS, *arguments, delta=True)
    gpus.append(Gpus(len(plan.topology.gpu_members)))
    within_hosts = case in MIXED or case in ("an engine on each host", "other GPUs of the host")
    assert bool(plan.topology.gpu_buffers) == within_hosts
    members = (*plan.topology.trainers, *plan.topology.engines)
    for rank, trainer in enumerate(plan.topology.trainers):
        messages = [each for of_round in plan.outgoing(rank).values() for each in of_round]
        targets, _ = plan.gpu_peers(rank, messages)
        assert {members[target].host for target in targets} <= {trainer.host}
    with connected(plan, store, next(_generation)) as processes:
        for seed in (0, 1, 1):
            check_update(processes, seed)
        counted = sent_bytes(processes)
        assert counted.content == crossing_bytes(plan)
        assert (counted.content > 0) or case not in MIXED
        assert counted.sent <= counted.content // 20
        assert (gpus[0].largest > 0) == within_hosts
