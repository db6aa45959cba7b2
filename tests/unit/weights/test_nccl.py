"""Updates between GPUs with a model of NCCL (nccl_model): every element arrives once, and nothing deadlocks."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.sync_plan import SyncPlan
from model_converters.mapping.layout import TrainLayout
from tests.tiny_models import tiny_fields
from tests.unit.weights.nccl_model import Gpus
from tests.unit.weights.test_transfer import check_update
from tests.unit.weights.transfer import connected, store, sync_plan

EXPERTS = tiny_fields("qwen3_moe", vocab_size=97)
CASES: dict[str, Any] = {
    "engine elsewhere": (TrainLayout(2, ep=2), EngineLayout(), "A0 A1", "B0"),
    "engines elsewhere": (TrainLayout(2, tp=2), EngineLayout(tp=2), "A0 A1", "B0 B1 C0 C1"),
    "an engine on each host": (TrainLayout(4, ep=2, tp=2), EngineLayout(tp=2), "A0 A1 B0 B1", "A0 A1 B0 B1"),
    "an engine over two hosts": (TrainLayout(2, pp=2), EngineLayout(tp=2), "A0 B0", "A0 B0"),
    "one beside, one elsewhere": (TrainLayout(2, pp=2), EngineLayout(tp=2), "A0 B0", "A0 B0 C0 D0"),
    "engines the other way round": (TrainLayout(2, pp=2), EngineLayout(tp=2), "A0 B0", "A0 B0 B0 A0"),
    "other GPUs of the host": (TrainLayout(2, ep=2), EngineLayout(tp=2), "A0 A1", "A2 A3"),
    "two engines on every GPU": (TrainLayout(2, ep=2), EngineLayout(), "A0 B0", "A0 A0 B0 B0"),
}


def plan_of(case: str, num_slots: int = 2) -> SyncPlan:
    return sync_plan(EXPERTS, *CASES[case], num_slots=num_slots)


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_nccl_three_updates_arrive_exactly(gpus: list[Gpus], case: str, num_slots: int) -> None:
    plan = plan_of(case, num_slots)
    assert plan.num_rounds > 3
    gpus.append(Gpus(len(plan.topology.gpu_members)))
    with connected(plan, store()) as processes:
        for seed in range(3):
            check_update(processes, seed)
    assert gpus[0].largest > 0


def test_nccl_sync_round_is_one_launch_per_process(gpus: list[Gpus]) -> None:
    plan = plan_of("an engine on each host")
    gpus.append(Gpus(4))
    with connected(plan, store()) as processes:
        gpus[0].largest = 0  # the handshake is a launch of several messages, too
        check_update(processes, 0)
    assert gpus[0].largest > 1  # its sends, and the receives into its own buffer


@pytest.mark.parametrize(
    ("trainers", "engines", "size", "buffers", "members"),
    [
        ("A0 A1", "B0 B1", 2, {0, 1}, (0, 1, 2, 3)),
        ("A0 B0", "A0 B0", 2, {0, 1}, (0, 1)),  # engine ranks on a trainer's GPU do not join the group
        ("A0 B0", "A0 C0", 2, {0, 1}, (0, 1, 3)),
        ("A0", "A0", 1, set(), ()),  # all slices are written to mapped memory
        ("A B", "C0 D0", 1, set(), ()),  # trainers without a GPU
        ("A0 A1", "C D", 1, set(), ()),
        ("A0 A1", "B0 B0", 1, set(), ()),  # NCCL allows one process per GPU
        ("A0 A1 B0 B1", "A2 A3", 2, {0, 1}, (0, 1, 2, 3, 4, 5)),
        ("A0 A1 B0 B1", "A2 B", 1, {0}, (0, 1, 2, 3, 4)),  # the second one has no GPU: through its host's memory
    ],
)
def test_gpu_buffers_need_one_gpu_per_member(
    trainers: str, engines: str, size: int, buffers: set[int], members: tuple[int, ...]
) -> None:
    layout = EngineLayout(tp=size)
    topology = sync_plan(EXPERTS, TrainLayout(len(trainers.split())), layout, trainers, engines).topology
    assert topology.gpu_buffers == buffers
    assert topology.gpu_members == members
