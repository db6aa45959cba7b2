"""Processes that `launch` creates: names, nodes, reserved and shared GPUs, CPUs."""

from __future__ import annotations

from mcore_rl.config.models import TeacherConfig, TeacherSourceConfig
from mcore_rl.config.schema import Config
from mcore_rl.resolved.placement import Guests, teacher_ranks
from mcore_rl.resolved.process_plan import engine_names, plan_processes

CRITIC = {"critic rank": Guests("critic", 2)}
JUDGE = {"judge engine": Guests("judge", 1, tp=2)}


def config(device: str = "cuda", **changes: object) -> Config:
    """Two nodes with four slots, one engine per pair of trainer ranks."""
    made = Config()
    made.cluster.device, made.cluster.nodes, made.cluster.gpus_per_node = device, 2, 4
    made.rollout.tp, made.rollout.num_engines = 2, 4
    for key, value in changes.items():
        section, _, name = key.partition("__")
        setattr(getattr(made, section), name, value)
    return made


def test_plan_processes_colocated_engines_share_gpus_of_ranks() -> None:
    plan = plan_processes(config(), CRITIC | JUDGE, with_engines=True)
    assert [(each.name, each.node, each.num_gpus) for each in plan.ranks[3:5]] == [
        ("trainer rank 3", 0, 1),
        ("trainer rank 4", 1, 1),
    ]
    [third] = plan.engines[2]
    assert (third.name, third.node, third.num_cpus, third.num_gpus) == ("rollout engine 2", 1, 2, 0)
    # Numbers of the run's ranks, not places on the node.
    assert third.shares_gpus_of == (4, 5)
    assert [(each.name, each.shares_gpus_of) for each in plan.guests["critic"]] == [
        ("critic rank 0", (0,)),
        ("critic rank 1", (1,)),
    ]
    [judge] = plan.guests["judge"]
    assert (judge.name, judge.num_cpus, judge.num_gpus, judge.shares_gpus_of) == ("judge engine 0", 2, 0, (0, 1))
    assert len(list(plan)) == 8 + 4 + 2 + 1


def test_plan_processes_disaggregated_engines_reserve_their_gpus() -> None:
    made = config(cluster__placement="disaggregated", actor__num_ranks=4, rollout__num_engines=2)
    plan = plan_processes(made, {}, with_engines=True)
    assert [(e.node, e.num_gpus, e.shares_gpus_of) for [e] in plan.engines] == [(1, 2, ()), (1, 2, ())]


def test_plan_processes_on_cpu_reserve_no_gpus() -> None:
    plan = plan_processes(config("cpu"), CRITIC, with_engines=True)
    assert {(each.num_gpus, each.shares_gpus_of) for each in plan} == {(0, ())}
    assert [each.peers for each in plan.ranks] == [4] * 8


def test_plan_processes_wide_engine_has_one_process_per_node() -> None:
    plan = plan_processes(config(rollout__tp=8, rollout__num_engines=1), {}, with_engines=True)
    [hosts] = plan.engines
    assert [(each.name, each.node, each.num_cpus) for each in hosts] == [
        ("rollout engine 0", 0, 4),
        ("rollout engine 0, host 2 of 2", 1, 4),
    ]
    assert hosts[1].shares_gpus_of == (4, 5, 6, 7)


def test_plan_processes_supervised_has_ranks_only() -> None:
    plan = plan_processes(config(), {}, with_engines=False)
    assert plan.engines == ()
    assert {each.section for each in plan} == {"actor"}


def test_plan_processes_without_trainers_engines_have_all_slots() -> None:
    plan = plan_processes(config(), {"judge engine": Guests("judge", 1)}, with_engines=True, with_trainers=False)
    assert plan.ranks == ()
    assert [(e.node, e.num_gpus) for [e] in plan.engines] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    # Four GPUs of each node for the engines, and a CPU for the process that only sends requests to a server.
    assert plan.placement.bundle == {"CPU": 5.0, "GPU": 4.0}
    [client] = plan.guests["judge"]
    assert (client.node, client.num_gpus, client.shares_gpus_of) == (0, 0, ())


def test_plan_processes_ranks_of_teachers_share_the_first_slots() -> None:
    teachers = TeacherConfig(hf_path="a", by_source=[TeacherSourceConfig("b", hf_path="b")], num_ranks=5)
    plan = plan_processes(config(), {"teacher rank": teacher_ranks(teachers)}, with_engines=True)
    found = plan.guests["teacher"]
    assert [each.shares_gpus_of for each in found] == [(rank,) for rank in range(5)] * 2
    assert [each.node for each in found] == [0, 0, 0, 0, 1] * 2
    # Two teachers on four slots of the first node, beside its four ranks and two engines of two.
    assert plan.placement.bundle["CPU"] == 4 + 4 + 8


def test_engine_names_leader_has_the_engines_name() -> None:
    assert engine_names("rollout engine 3", 1) == ["rollout engine 3"]
    assert engine_names("rollout engine 3", 3)[1:] == [f"rollout engine 3, host {host} of 3" for host in (2, 3)]
