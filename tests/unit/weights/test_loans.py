"""Messages of a round that are sent from the memory of another message."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import count

import pytest
import torch
import torch.distributed as dist

from mcore_rl.weights.loans import Loan, find_loans
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.messages import Message
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.link import GlooTransfer
from mcore_rl.weights.transports.mapped_buffers import MappedSender
from model_converters.mapping.layout import TrainLayout
from tests.tiny_models import tiny_fields
from tests.unit.weights import transfer
from tests.unit.weights.test_transfer import check_update
from tests.unit.weights.transfer import connected, sync_plan

EXPERTS = tiny_fields("qwen3_moe", vocab_size=97)
LAYER_FITS = 150_000
"""Bytes of a bucket that holds a layer, and not the model."""
_generation = count()


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return transfer.store()


def expert_plan(bucket_bytes: int = LAYER_FITS, num_slots: int = 2, engines: str = "AB") -> SyncPlan:
    return sync_plan(
        EXPERTS, TrainLayout(2, ep=2), EngineLayout(), "AB", engines, bucket_bytes=bucket_bytes, num_slots=num_slots
    )


def check_loans(messages: list[Message], borrowers: set[int]) -> dict[int, Loan]:
    """Check that the lender has the same elements at the place of each borrowed slice. Returns the loans."""
    by_receiver = {each.receiver: each for each in messages}
    loans = find_loans(messages, borrowers)
    assert loans.keys() <= borrowers & by_receiver.keys()
    for number, (lender, offset) in loans.items():
        assert lender not in loans
        at = {each.offset: (each.boxes, each.mcore_name, each.local_start) for each in by_receiver[lender].slices}
        for each in by_receiver[number].slices:
            assert at[offset + each.offset] == (each.boxes, each.mcore_name, each.local_start)
    return loans


def test_find_loans_experts_for_another_host_are_in_the_local_message() -> None:
    plan = expert_plan()
    for rank, remote in ((0, 1), (1, 0)):
        for messages in plan.outgoing(rank).values():
            needed = {each.receiver for each in messages} & {remote}
            assert check_loans(messages, {remote}).keys() == needed
    sent = [each for messages in plan.outgoing(0).values() for each in messages if each.receiver == 1]
    assert {".experts." in part.hf_name for each in sent for part in each.slices} == {True}


def test_find_loans_equal_messages_to_two_hosts_share_memory() -> None:
    plan = sync_plan(EXPERTS, TrainLayout(1), EngineLayout(), "A", "BC")
    for messages in plan.outgoing(0).values():
        assert check_loans(messages, {0, 1}) == {1: Loan(0, 0)}


def test_find_loans_part_of_a_message_is_sent_from_its_offset() -> None:
    plan = sync_plan(EXPERTS, TrainLayout(1), EngineLayout(), "A", "B")
    whole = max((each for messages in plan.outgoing(0).values() for each in messages), key=lambda each: each.num_bytes)
    first, end = whole.slices[1], whole.slices[3]
    part = replace(
        whole,
        receiver=1,
        slices=tuple(replace(each, offset=each.offset - first.offset) for each in whole.slices[1:3]),
    )
    assert check_loans([whole, part], {0, 1}) == {1: Loan(0, first.offset)}
    other = replace(part, slices=(part.slices[0], replace(end, offset=part.slices[1].offset)))
    assert check_loans([whole, other], {0, 1}) == {}


def test_send_borrowed_slot_is_written_after_its_message_has_left(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: dict[int, list[str]] = {}
    last_written: dict[int, int] = {}
    acquire, wait = MappedSender.acquire, GlooTransfer.wait

    def acquire_slot(self: MappedSender, sync_round: int, message: Message) -> torch.Tensor:
        memory, rank = acquire(self, sync_round, message), threading.get_ident()
        last_written[rank] = memory.data_ptr()
        events.setdefault(rank, []).append("write")
        return memory

    def wait_until_sent(self: GlooTransfer) -> None:
        wait(self)
        rank = threading.get_ident()
        # The first slices of the slot are those that the other host needs, so both messages have the same address.
        if last_written.get(rank) == self.memory.data_ptr():
            events[rank].append("left")

    monkeypatch.setattr(MappedSender, "acquire", acquire_slot)
    monkeypatch.setattr(GlooTransfer, "wait", wait_until_sent)
    plan = expert_plan(num_slots=1)
    with connected(plan, store, next(_generation)) as processes:
        check_update(processes, 0)
    expected = [
        [kind for loans in sender._loans.values() for kind in ("write", "left")[: 1 + len(loans)]]
        for sender in processes.senders
    ]
    assert sorted(events.values()) == sorted(expected)
    assert all(each.count("left") > 1 for each in expected)


def test_find_loans_messages_with_other_slices_have_their_own_memory() -> None:
    plan = sync_plan(EXPERTS, TrainLayout(1), EngineLayout(tp=2), "A", "BB")
    rounds = list(plan.outgoing(0).values())
    borrowed = [check_loans(messages, {0, 1}) for messages in rounds]
    divided = [len({messages[0].slices[0].first, messages[-1].slices[0].first}) > 1 for messages in rounds]
    assert sum(divided) > len(rounds) // 2
    assert not any(loans for loans, is_divided in zip(borrowed, divided, strict=True) if is_divided)


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("engines", ["AB", "AAB", "ABC"])
def test_transfer_from_memory_of_other_messages_arrives_exactly(
    store: dist.TCPStore, engines: str, num_slots: int
) -> None:
    plan = expert_plan(num_slots=num_slots, engines=engines)
    with connected(plan, store, next(_generation)) as processes:
        assert all(any(sender._loans.values()) for sender in processes.senders)
        for seed in range(3):
            check_update(processes, seed)


def test_plan_engines_share_rounds_if_buckets_have_all_experts() -> None:
    def first_buckets(plan: SyncPlan) -> set[int]:
        incoming = plan.incoming([0, 1])
        return {placed.message.bucket for buffer in (0, 1) for placed in incoming[buffer].at(0)}

    assert first_buckets(expert_plan()) == {0}
    assert len(first_buckets(expert_plan(bucket_bytes=20_000))) == 2
