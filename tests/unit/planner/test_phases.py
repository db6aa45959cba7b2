"""GPU memory by phase, calculated by hand: a policy, its engine and colocated models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_rl.config.models import ActorConfig, OffloadConfig, TeacherConfig
from mcore_rl.config.schema import Config
from mcore_rl.planner.activations import StageActivations
from mcore_rl.planner.colocated import ColocatedModels, ColocatedRank, ColocatedRanks, _averaged, _take_turns
from mcore_rl.planner.engine import ASLEEP_BYTES, EngineRank
from mcore_rl.planner.phases import Phases, rank_phases
from mcore_rl.planner.state import RankState
from mcore_rl.planner.sync import staging_bytes, transport
from mcore_rl.planner.verdict import _remedy, _warnings
from mcore_rl.planner.workload import BatchArithmetic
from model_converters.mapping.layout import TrainLayout

STATE = RankState(10, weights_bytes=20, gradients_bytes=40, optimizer_bytes=120)
ACTIVATIONS = StageActivations({"all": 300.0}, forward_only_bytes=50.0)
ENGINE = EngineRank(1000, 200, 4000, 1, 10.0)
CRITIC = ColocatedRank(resident=7, working=700, host_bytes=70)
REWARD = ColocatedRank(resident=3, working=30, host_bytes=33)


def phases(models: ColocatedModels, *, offloaded: bool = False, shared: bool = True) -> Phases:
    actor = ActorConfig(offload=OffloadConfig(params=offloaded, grads=offloaded, optimizer=offloaded))
    return rank_phases(actor.offload, STATE, ACTIVATIONS, ENGINE, shared=shared, models=models)


def test_a_policy_alone() -> None:
    alone = phases(ColocatedModels())
    assert alone.by_name == {
        "generate": 180 + 5200 + ASLEEP_BYTES,
        "logp": 180 + 50 + ASLEEP_BYTES,
        "update": 180 + 300 + ASLEEP_BYTES,
        "sync": 180 + 1000 + ASLEEP_BYTES,
    }
    assert alone.host_bytes == 0


def test_graphs_of_an_engine_stay_in_all_phases() -> None:
    engine = replace(ENGINE, graphs_bytes=5000)
    found = rank_phases(OffloadConfig(), STATE, ACTIVATIONS, engine, shared=True)
    alone = rank_phases(OffloadConfig(), STATE, ACTIVATIONS, ENGINE, shared=True)
    assert found.by_name == {name: size + 5000 for name, size in alone.by_name.items()}


@pytest.mark.parametrize("offloaded", [False, True])
def test_other_models_are_there_all_the_time_and_work_in_their_phases(offloaded: bool) -> None:
    alone, found = (
        phases(models, offloaded=offloaded) for models in (ColocatedModels(), ColocatedModels(CRITIC, REWARD))
    )
    for name in ("generate", "logp", "update", "sync"):
        assert found.by_name[name] == alone.by_name[name] + 7 + 3
    kept = 0 if offloaded else 160
    # After its own pass the policy's weights are on the device; before it they are not.
    assert found.by_name["critic"] == 20 + kept + ASLEEP_BYTES + 700 + 3
    assert found.by_name["score"] == (0 if offloaded else 180) + ASLEEP_BYTES + 30 + 7
    assert found.host_bytes == alone.host_bytes + 70 + 33
    assert list(found.by_name) == ["generate", "score", "logp", "critic", "update", "sync"]


def test_a_judge_and_a_reward_model_score_one_after_the_other() -> None:
    judge = ColocatedRank(resident=1, working=400, host_bytes=50)
    both = phases(ColocatedModels(CRITIC, REWARD, judge))
    assert both.by_name["score"] == 180 + ASLEEP_BYTES + 400 + 7 + 3
    assert both.by_name["update"] == phases(ColocatedModels(CRITIC, REWARD)).by_name["update"] + 1
    assert phases(ColocatedModels(judge=judge)).by_name["score"] == 180 + ASLEEP_BYTES + 400


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_teacher_works_beside_the_weights_of_the_policy(offloaded: bool) -> None:
    teacher = ColocatedRank(resident=5, working=800, host_bytes=60)
    alone, found = (
        phases(models, offloaded=offloaded) for models in (ColocatedModels(), ColocatedModels(CRITIC, teacher=teacher))
    )
    kept = 0 if offloaded else 160
    # The policy's own pass for old log-probabilities comes first, so its weights are on the device.
    assert found.by_name["teacher"] == 20 + kept + ASLEEP_BYTES + 800 + 7
    assert found.by_name["update"] == alone.by_name["update"] + 5 + 7
    assert found.host_bytes == alone.host_bytes + 60 + 70
    assert list(found.by_name) == ["generate", "logp", "teacher", "critic", "update", "sync"]


@pytest.mark.parametrize("place", ["teacher_engine", "teacher_rank"])
@pytest.mark.parametrize("offloaded", [False, True])
def test_a_teacher_elsewhere_works_before_the_policy_is_loaded(offloaded: bool, place: str) -> None:
    teacher = ColocatedRank(resident=5, working=800, host_bytes=60)
    found = phases(replace(ColocatedModels(CRITIC), **{place: teacher}), offloaded=offloaded)
    assert found.by_name["teacher"] == (0 if offloaded else 180) + ASLEEP_BYTES + 800 + 7
    assert found.by_name["update"] == phases(ColocatedModels(CRITIC), offloaded=offloaded).by_name["update"] + 5


def test_teachers_take_turns_on_a_rank() -> None:
    first = (ColocatedRank(resident=5, working=100, host_bytes=60), ColocatedRank(5, 90, 61))
    second = (ColocatedRank(resident=2, working=200, host_bytes=40), ColocatedRank(2, 20, 41))
    # The weights of both stay if they are not offloaded; only one pass runs at a time.
    assert _take_turns([first, second]) == (ColocatedRank(7, 7 + 198, 100), ColocatedRank(7, 7 + 85, 102))


@pytest.mark.parametrize(("offload", "device", "host"), [(True, 0, 400), (False, 400, 0)])
def test_moving_average_has_float32_values_beside_weights(offload: bool, device: int, host: int) -> None:
    rank, held = ColocatedRank(resident=5, working=800, host_bytes=60), RankState(100, 200, 0, 0)
    found = _averaged(rank, held, 2, OffloadConfig(params=offload), replicas=2)
    # Two data-parallel ranks write the 400 bytes once.
    assert found == ColocatedRank(5 + device, 800 + device, 60 + host, 200, 200 if offload else 0)
    # float32 weights are the average themselves.
    same = _averaged(rank, RankState(100, 400, 0, 0), 4, OffloadConfig(params=offload), replicas=2)
    assert same == replace(rank, checkpoint_bytes=200, averaging_bytes=400 if offload else 0)


def test_moving_average_is_loaded_after_the_updates() -> None:
    """Its weights need the memory of the activations."""
    of = [ColocatedModels(teacher=ColocatedRank(0, 1, 2, averaging_bytes=size)) for size in (0, 300, 450)]
    updates = [phases(models).by_name["update"] for models in of]
    assert updates == [updates[0], updates[0], updates[0] + 150]


@pytest.mark.parametrize(("leaves", "elsewhere", "host"), [(True, 0, 20), (False, 20, 0)])
def test_a_reference_is_a_second_set_of_weights(leaves: bool, elsewhere: int, host: int) -> None:
    alone, found = phases(ColocatedModels()), phases(ColocatedModels(reference=True, reference_leaves=leaves))
    assert found.by_name["logp"] == alone.by_name["logp"] + 20
    assert found.host_bytes == host
    for name in ("generate", "update", "sync"):
        assert found.by_name[name] == alone.by_name[name] + elsewhere


def test_a_model_of_fewer_ranks_is_beside_the_first() -> None:
    roles = ColocatedRanks(critic=(CRITIC, ColocatedRank(1, 2, 3)), reward_model=(REWARD,))
    assert [roles.at(rank).critic for rank in range(3)] == [CRITIC, ColocatedRank(1, 2, 3), None]
    assert [roles.at(rank).reward_model for rank in range(2)] == [REWARD, None]
    assert roles.widest == ColocatedModels(CRITIC, REWARD)
    everywhere = ColocatedModels(judge=REWARD, reference=True)
    assert ColocatedRanks(everywhere=everywhere).at(5) == everywhere


def test_what_to_set_names_the_role() -> None:
    config, layout = Config(), TrainLayout(1)
    found = phases(ColocatedModels(CRITIC, REWARD))
    assert _remedy(config, layout, "critic", found).startswith("set critic.recompute=full, or actor.offload.optimizer")
    assert "critic.offload.params=true" in _remedy(config, layout, "generate", found)
    assert "critic.offload" not in _remedy(config, layout, "generate", phases(ColocatedModels()))
    assert "reward_model.parallel" in _remedy(config, layout, "score", found)
    config.teacher = TeacherConfig(hf_path="a", num_ranks=2, offload=False)
    remedy = _remedy(config, layout, "teacher", found)
    assert "teacher.offload=true" in remedy
    assert "teacher.parallel.ep, pp or tp with more teacher.num_ranks" in remedy
    assert "actor.parallel" not in remedy
    # fsdp2 rejects all axes, and sharded parameters reject offloaded gradients.
    config.actor.strategy = config.critic.strategy = config.reward_model.strategy = "fsdp2"
    for phase in ("critic", "score", "update"):
        remedy = _remedy(config, layout, phase, found)
        assert remedy.endswith("a higher cluster.nodes")
        assert ".parallel." not in remedy


@pytest.mark.parametrize(
    ("engine", "placement", "fraction", "warned"),
    [
        ("sglang", "disaggregated", 0.95, True),  # 4 of 80 GiB are left
        ("sglang", "disaggregated", 0.9, False),
        ("sglang", "colocated", 0.95, False),  # its phase is compared with the GPU
        ("vllm", "disaggregated", 0.95, False),
    ],
)
def test_workspace_and_graphs_beside_sglang_need_room(
    engine: str, placement: str, fraction: float, warned: bool
) -> None:
    config, size = Config(), replace(ENGINE, workspace_bytes=2**30, graphs_bytes=4 * 2**30, sequences=1000.0)
    config.rollout.engine, config.rollout.gpu_memory_fraction = engine, fraction
    config.cluster.placement, config.cluster.gpu_memory_gib = placement, 80
    batch = BatchArithmetic(8, 1, 8, 8.0, 10.0, 10.0, microbatches=8, most_microbatches=8)
    found = list(_warnings(config.rollout, config.cluster, TrainLayout(1), size, batch, cuda=True))
    assert any("leaves 4.0 GiB" in text and "may need 6.0 GiB" in text for text in found) == warned


def test_staging_buffers_are_there_in_every_phase() -> None:
    alone, found = phases(ColocatedModels()), phases(ColocatedModels(staging=9))
    assert {name: found.by_name[name] - size for name, size in alone.by_name.items()} == dict.fromkeys(alone.by_name, 9)


@pytest.mark.parametrize(
    ("transport", "placement", "ranks", "slots"),
    [
        ("auto", "colocated", 8, 4),  # received and sent data
        ("auto", "colocated", 1, 2),  # there is no other rank
        ("network", "colocated", 8, 2),
        ("shared_memory", "colocated", 8, 0),
        ("files", "colocated", 8, 0),
        ("auto", "disaggregated", 8, 2),
    ],
)
def test_staging_buffers_on_a_gpu(transport: str, placement: str, ranks: int, slots: int) -> None:
    config = Config()
    config.cluster.nodes, config.cluster.gpus_per_node, config.cluster.placement = 2, 8, placement
    config.weights.transport, config.weights.bucket_mib = transport, 64.0
    for cuda, size in ((True, slots * 64 * 2**20), (False, 0)):
        assert staging_bytes(config.weights, config.cluster, ranks, cuda=cuda) == size


@pytest.mark.parametrize(
    ("placement", "nodes", "on_gpus", "on_cpus"),
    [
        ("colocated", 1, "cuda_ipc", "shared_memory"),
        ("disaggregated", 1, "network", "shared_memory"),  # between the GPUs of a node
        ("disaggregated", 2, "network", "network"),
    ],
)
def test_transport_of_auto_depends_on_devices(placement: str, nodes: int, on_gpus: str, on_cpus: str) -> None:
    config = Config()
    config.cluster.nodes, config.cluster.placement = nodes, placement
    assert [transport(config.weights, config.cluster, cuda=cuda) for cuda in (True, False)] == [on_gpus, on_cpus]
