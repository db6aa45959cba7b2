"""Syncs with rollout.quantization through files, whole and as deltas: engines receive the bits of whole tensors."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.sync_plan import SyncPlan
from mcore_rl.weights.transports.files.run_files import RunFiles
from mcore_rl.weights.verify import Comparison, compare
from tests.unit.weights import test_int4_sync as int4
from tests.unit.weights import test_quantised_sync as quantised
from tests.unit.weights import transfer
from tests.unit.weights.delivery import Tensors
from tests.unit.weights.transfer import SHORT_TIMEOUT_SECONDS, connected, receive_digests, update

FILES_CASES = [
    "one rank",
    "heads on two engine ranks",
    "tp and replicas, two engines",
    "ep and etp",
    "shared parameters",
]
"""Blocks that no rank divides, that one rank divides for two engine ranks, and that several ranks divide."""
SPECIAL = torch.tensor([0.0, -0.0, 1e-39, -1e-39, 448.0, 3e38], dtype=torch.float32)
"""Zeros of both signs, denormals, and large values, which change the scale of their block."""
_generation = iter(range(10**6))


@pytest.fixture(scope="module")
def store() -> dist.TCPStore:
    return transfer.store()


def files_plan(case: str, *, delta: bool) -> SyncPlan:
    plan = quantised.fp8_plan(case)
    return replace(plan, topology=replace(plan.topology, transport="files", delta=delta))


def edit(checkpoint: Tensors, chance: random.Random) -> None:
    """Replace some elements of a third of the tensors."""
    for tensor in chance.sample(list(checkpoint.values()), len(checkpoint) // 3):
        flat = tensor.view(-1)
        for at in chance.sample(range(len(flat)), max(1, len(flat) // 200)):
            flat[at] = SPECIAL[chance.randrange(len(SPECIAL))] if chance.random() < 0.2 else flat[at] * 1.5


def file_bytes(folder: str, number: int) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob(f"{number}.*.weights.*"))


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("case", FILES_CASES)
def test_random_edits_through_files_equal_whole_tensors(
    store: dist.TCPStore, case: str, delta: bool, tmp_path: Path
) -> None:
    plan, chance = files_plan(case, delta=delta), random.Random(5)
    folder = RunFiles(f"{tmp_path}/run").begin_connection(1)
    checkpoint = quantised.checkpoint_of(plan)
    with connected(plan, store, next(_generation), folder=folder) as processes:
        for number in range(4):
            taken, acknowledged, _ = update(processes, quantised.held_by(plan, checkpoint))
            quantised.check_bits(plan, taken, quantised.expected_tensors(plan, checkpoint))
            written = file_bytes(folder, number)
            whole = sum(acknowledged) // len(plan.topology.engines) * plan.engine_layout.num_ranks
            assert written == whole if not delta else (written < whole / 3) == (number > 0)
            edit(checkpoint, chance)


@pytest.mark.parametrize("delta", [False, True])
def test_int4_edits_through_files_arrive_without_connections(store: dist.TCPStore, delta: bool, tmp_path: Path) -> None:
    plan, chance = int4.int4_plan("stacked experts"), random.Random(8)
    plan = replace(plan, topology=replace(plan.topology, transport="files", delta=delta))
    folder = RunFiles(f"{tmp_path}/run").begin_connection(1)
    checkpoint = quantised.checkpoint_of(plan)
    with connected(plan, store, next(_generation), folder=folder) as processes:
        # No rank divides a group, so trainer ranks have nothing to exchange.
        assert {vars(sender._channels.host)["_among_trainers"] for sender in processes.senders} == {None}
        for number in range(3):
            taken, acknowledged, _ = update(processes, quantised.held_by(plan, checkpoint))
            int4.check_bits(plan, taken, checkpoint)
            written, whole = file_bytes(folder, number), sum(acknowledged)
            assert written == whole if not delta else (written < whole / 3) == (number > 0)
            edit(checkpoint, chance)


def test_delta_after_a_new_connection_is_whole_again(store: dist.TCPStore, tmp_path: Path) -> None:
    """A restarted engine has no copies: the connection starts again, and so do the versions of the frames."""
    plan, files = files_plan("tp and replicas, two engines", delta=True), RunFiles(f"{tmp_path}/run")
    checkpoint, chance = quantised.checkpoint_of(plan), random.Random(6)
    sizes = []
    for number in (1, 2):
        folder = files.begin_connection(number)
        with connected(plan, store, next(_generation), folder=folder) as processes:
            for transfer_number in range(2):
                edit(checkpoint, chance)
                taken, *_ = update(processes, quantised.held_by(plan, checkpoint))
                quantised.check_bits(plan, taken, quantised.expected_tensors(plan, checkpoint))
                sizes.append(file_bytes(folder, transfer_number))
    assert sizes[0] == sizes[2] > 3 * max(sizes[1], sizes[3])


@pytest.mark.parametrize("delta", [False, True])
def test_digests_through_files_detect_one_code_and_one_scale(store: dist.TCPStore, delta: bool, tmp_path: Path) -> None:
    plan = files_plan("etp inside blocks", delta=delta)
    checkpoint = quantised.checkpoint_of(plan)
    expected = quantised.expected_tensors(plan, checkpoint)
    with connected(plan, store, next(_generation), folder=RunFiles(f"{tmp_path}/run").begin_connection(1)) as processes:
        held = quantised.held_by(plan, checkpoint)
        update(processes, held)
        digests = receive_digests(processes, held)[0]
        edit(checkpoint, random.Random(7))  # another update follows the digests
        taken, *_ = update(processes, quantised.held_by(plan, checkpoint))
        quantised.check_bits(plan, taken, quantised.expected_tensors(plan, checkpoint))
    boxes = plan.shard_map.boxes(0)
    assert compare(digests, expected.items(), boxes) == Comparison()
    weight = "model.layers.1.self_attn.o_proj.weight"
    for name in (weight, f"{weight}_scale_inv"):
        changed = expected[name].clone()
        quantised.bits(changed)[-1, -1] ^= 1
        assert compare(digests, (expected | {name: changed}).items(), boxes) == Comparison({name})


def test_maxima_without_a_member_of_the_group_name_it(store: dist.TCPStore, tmp_path: Path) -> None:
    """Trainer ranks exchange the maxima of divided blocks themselves; without them no file is written."""
    plan, folder = files_plan("tp inside blocks", delta=False), RunFiles(f"{tmp_path}/run").begin_connection(1)
    with connected(plan, store, next(_generation), SHORT_TIMEOUT_SECONDS, folder) as processes:
        held = quantised.held_by(plan, quantised.checkpoint_of(plan))
        processes.setups[1].disconnect()
        with pytest.raises(PeerLostError, match="trainer rank 1 on A: "):
            processes.senders[0].send(held[0])
        assert not list(Path(folder).rglob("0.*"))
