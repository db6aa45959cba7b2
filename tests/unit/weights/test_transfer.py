"""Updates through real sockets and shared memory on simulated hosts: every element arrives once in all topologies."""

from __future__ import annotations

import pickle
from dataclasses import fields
from functools import partial

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from mcore_rl.errors import PeerLostError, WeightSyncError
from mcore_rl.weights.receive import SliceReceiver
from mcore_rl.weights.slices import routes
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.senders import choose_senders
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.link import open_store
from mcore_rl.weights.verify import compare
from model_converters.mapping.layout import TrainLayout
from tests.tiny_models import tiny_fields
from tests.unit.weights import transfer
from tests.unit.weights.delivery import Tensors, check_taken, trainer_tensors
from tests.unit.weights.test_slices import random_checkpoint
from tests.unit.weights.transfer import SHORT_TIMEOUT_SECONDS, Processes, connected, receive_digests, sync_plan, update

DENSE, EXPERTS = tiny_fields("qwen3", vocab_size=97), tiny_fields("qwen3_moe", vocab_size=97)
CASES = {
    "one host": (DENSE, TrainLayout(2, tp=2), EngineLayout(tp=2), "AA", "AA"),
    "two engines read one buffer": (DENSE, TrainLayout(2, pp=2), EngineLayout(), "AA", "AA"),
    "engine elsewhere": (EXPERTS, TrainLayout(2, ep=2), EngineLayout(), "AA", "B"),
    "engine over two hosts": (EXPERTS, TrainLayout(2), EngineLayout(tp=2), "AB", "AB"),
    "engine over two hosts, whole experts": (EXPERTS, TrainLayout(2, ep=2), EngineLayout(2, 1, 1, True), "AB", "AB"),
    "an engine on each host": (EXPERTS, TrainLayout(2, ep=2), EngineLayout(), "AB", "AB"),
    "all kinds": (EXPERTS, TrainLayout(4, tp=2, pp=2), EngineLayout(), "ABBC", "ABD"),
    "four of everything": (EXPERTS, TrainLayout(4, ep=2, tp=2), EngineLayout(tp=2), "AABB", "AABBCC"),
}


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return transfer.store()


_generation = iter(range(10**6))


def checkpoint_of(plan: SyncPlan, seed: int) -> Tensors:
    return random_checkpoint(plan.rows, seed)


def held_by(plan: SyncPlan, checkpoint: Tensors) -> list[Tensors]:
    ranks = range(plan.train_layout.world_size)
    return [trainer_tensors(plan.rows, plan.train_layout, rank, checkpoint) for rank in ranks]


def check_update(processes: Processes, seed: int) -> None:
    """Run an update of random tensors. Every element must arrive once, and receivers must count the bytes sent."""
    plan = processes.plan
    checkpoint = checkpoint_of(plan, seed)
    taken, received, sent = update(processes, held_by(plan, checkpoint))
    check_taken(taken, checkpoint, plan.hf_config, plan.engine_layout)
    by_buffer = np.sum(sent, axis=0)
    assert len(by_buffer) == len(plan.topology.buffers)
    assert received == [by_buffer[plan.topology.buffer_of(rank)] for rank in range(len(received))]


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_transfer_three_updates_arrive_exactly(store: dist.TCPStore, case: str, num_slots: int) -> None:
    plan = sync_plan(*CASES[case], num_slots=num_slots)
    assert plan.num_rounds > 3
    with connected(plan, store, next(_generation)) as processes:
        for seed in range(3):
            check_update(processes, seed)


@pytest.mark.parametrize(("transport", "owners"), [("network", [None, None]), ("shared_memory", [0, 1])])
def test_transfer_required_transport_is_used(store: dist.TCPStore, transport: str, owners: list[int | None]) -> None:
    plan = sync_plan(*CASES["one host"], transport=transport)
    assert [buffer.owner for buffer in plan.topology.buffers] == owners
    with connected(plan, store, next(_generation)) as processes:
        check_update(processes, 4)


def test_plan_engines_start_with_different_buckets() -> None:
    """Otherwise the ranks of one pipeline stage would send to all engines while the other stages wait."""
    plan = sync_plan(DENSE, TrainLayout(2, pp=2), EngineLayout(), "AB", "CD", bucket_bytes=20_000)
    senders = [{placed.message.sender for placed in plan.incoming([buffer])[buffer].at(0)} for buffer in range(2)]
    assert senders == [{0}, {1}]


def test_plan_chooses_senders_once_and_is_sent_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(routes, "choose_senders", lambda *given: calls.append(1) or choose_senders(*given))
    plan = sync_plan(*CASES["four of everything"])
    incoming = plan.incoming([0, 3])
    assert plan.outgoing(2)
    assert len(calls) == 1
    other = pickle.loads(pickle.dumps(plan))
    assert vars(other).keys() == {each.name for each in fields(plan)}
    assert other.incoming([0, 3]) == incoming
    assert other.num_rounds == plan.num_rounds


def test_digests_cover_all_tensors_and_detect_changes(store: dist.TCPStore) -> None:
    plan = sync_plan(*CASES["all kinds"])
    with connected(plan, store, next(_generation)) as processes:
        checkpoint = checkpoint_of(plan, 5)
        held = held_by(plan, checkpoint)
        digests = receive_digests(processes, held)
        whole = {name: value for name, value in checkpoint.items() if "rotary" not in name}
        boxes = {name: (((0,) * value.dim(), tuple(value.shape)),) for name, value in whole.items()}
        for of_rank in digests:
            found = compare(of_rank, whole.items(), boxes)
            assert (found.differing, found.missing, found.unknown) == (set(), set(), set())
        name = "model.layers.1.self_attn.k_proj.weight"
        changed = whole | {name: whole[name] + torch.nn.functional.pad(torch.ones(1, 1), (3, 28, 5, 26))}
        assert compare(digests[0], changed.items(), boxes).differing == {name}
        del changed[name]
        assert compare(digests[0], changed.items(), boxes).missing == {name}


def drain(receiver: SliceReceiver) -> None:
    receiver.begin()
    for sync_round in range(receiver.num_rounds):
        receiver.receive(sync_round, ignore)


def ignore(name: str, start: tuple[int, ...], box: torch.Tensor) -> None:
    pass


def test_send_missing_tensor_is_named(store: dist.TCPStore) -> None:
    plan = sync_plan(*CASES["one host"])
    with connected(plan, store, next(_generation), SHORT_TIMEOUT_SECONDS) as processes:
        held = held_by(plan, checkpoint_of(plan, 6))
        for tensors in held:
            del tensors["decoder.final_layernorm.weight"]
        calls = [partial(sender.send, tensors) for sender, tensors in zip(processes.senders, held, strict=True)]
        readers = [partial(drain, receiver) for receiver in processes.receivers]
        with pytest.raises(WeightSyncError, match=r"this rank has no decoder\.final_layernorm\.weight, .*model\.norm"):
            transfer.at_once([*calls, *readers])


def test_receive_silent_peer_is_named_and_breaks_receiver(store: dist.TCPStore) -> None:
    plan = sync_plan(*CASES["engine elsewhere"])
    with connected(plan, store, next(_generation), SHORT_TIMEOUT_SECONDS) as processes:
        processes.receivers[0].begin()
        with pytest.raises(PeerLostError, match="trainer rank 0 on A: "):
            processes.receivers[0].receive(0, ignore)
        with pytest.raises(WeightSyncError, match="broken"):
            processes.receivers[0].begin()
        with pytest.raises(PeerLostError, match="rollout engine 0 on B: "):
            processes.senders[0].send(held_by(plan, checkpoint_of(plan, 7))[0])
    with connected(plan, store, next(_generation)) as processes:  # all processes connect again
        check_update(processes, 7)


def test_receive_round_out_of_order_raises(store: dist.TCPStore) -> None:
    plan = sync_plan(*CASES["engine elsewhere"])
    with connected(plan, store, next(_generation)) as processes:
        receiver = processes.receivers[0]
        with pytest.raises(WeightSyncError, match="round 0: the receiver is attached"):
            receiver.receive(0, ignore)
        receiver.begin()
        with pytest.raises(WeightSyncError, match="round 1 was requested, but round 0 is next"):
            receiver.receive(1, ignore)
        with pytest.raises(WeightSyncError, match="broken"):
            receiver.finish()


def test_open_store_listens_at_one_address_only() -> None:
    kept = open_store("127.0.0.1")
    listening = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in listening if c.laddr.port == kept.port] == ["127.0.0.1"]
