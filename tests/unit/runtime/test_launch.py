"""Processes are created as planned: the same names, nodes, CPUs and GPUs as `train --dry-run` prints."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.processes.stacks import handles_signal
from mcore_rl.resolved.placement import Guests
from mcore_rl.resolved.process_plan import ProcessPlan, plan_processes
from mcore_rl.runtime import launch

NODES: Any = ["strategy 0", "strategy 1"]


class Actor:
    """Ray actor class that records options and arguments instead of starting a process."""

    def __init__(self) -> None:
        self.created: list[tuple[dict[str, object], tuple[object, ...]]] = []

    def options(self, **options: object) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *arguments: self.created.append((options, arguments)))


@pytest.fixture
def plan() -> ProcessPlan:
    """Eight trainer ranks and four engines on two nodes, with two critic ranks."""
    config = Config()
    config.cluster.device, config.cluster.nodes, config.cluster.gpus_per_node = "cuda", 2, 4
    config.rollout.tp, config.rollout.num_engines = 2, 4
    return plan_processes(config, {"critic rank": Guests("critic", 2)}, with_engines=True)


def starter(plan: ProcessPlan, *, several_threads: bool = False) -> tuple[launch._Starter, list[str]]:
    """Return the starter, and the names of the processes that it has given to the watch."""
    watched: list[str] = []
    watch: Any = SimpleNamespace(add=lambda process: watched.append(process.name))
    return launch._Starter(plan, NODES, watch, "logs", several_threads), watched


def test_create_passes_plan_and_options_to_ray(plan: ProcessPlan) -> None:
    made, watched = starter(plan)
    actor: Any = Actor()
    processes = made.create(actor, plan.ranks, num_gpus=1)
    assert [each.name for each in processes] == watched == [f"trainer rank {rank}" for rank in range(8)]
    assert actor.created[5] == (
        {"num_cpus": 1, "num_gpus": 1, "scheduling_strategy": "strategy 1"},
        ("trainer rank 5", "logs", None),
    )


@pytest.mark.parametrize(("several_threads", "peers"), [(True, 2), (False, None)])
def test_group_has_the_planned_nodes_and_peers(plan: ProcessPlan, several_threads: bool, peers: int | None) -> None:
    made, _ = starter(plan, several_threads=several_threads)
    actor, groups = Actor(), list[Any]()
    role: Any = SimpleNamespace(actor=actor, guests=Guests("critic", 2), group=lambda *given: groups.append(given))
    made.group(role, launch.Stages())
    # No num_gpus: the ranks share the GPUs of trainer ranks.
    assert actor.created == [
        ({"num_cpus": 1, "scheduling_strategy": "strategy 0"}, (f"critic rank {rank}", "logs", peers))
        for rank in range(2)
    ]
    assert groups[0][1] == [0, 0]


def test_fleet_engines_get_their_planned_hosts(plan: ProcessPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FleetEngine", lambda *given: given)
    monkeypatch.setattr(launch, "Fleet", lambda *given: given)
    made, _ = starter(plan, several_threads=True)
    fleet: Any = made.fleet(3, Path("journals"))
    engines, watch, max_restarts = fleet
    assert (watch, max_restarts) == (made.watch, 3)
    number, name, options, peers, *_ = engines[2]
    assert (number, name, peers) == (2, "rollout engine 2", [4])
    assert options == [{"num_cpus": 2, "num_gpus": 0, "scheduling_strategy": "strategy 1"}]


@pytest.mark.parametrize(("address", "line"), [(None, "starting Ray"), ("h:1", "joining the Ray cluster at h:1")])
def test_cluster_is_announced_when_stack_dumps_work(
    address: str | None, line: str, plan: ProcessPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_ray(*_: object) -> None:
        raise ConfigError("no Ray in this test")

    monkeypatch.setattr(launch, "ray_cluster", no_ray)
    monkeypatch.setattr(launch, "shares_cores", lambda config: False)
    config, lines = Config(), list[tuple[str, bool]]()
    config.cluster.address = address
    with (
        pytest.raises(ConfigError, match="no Ray"),
        launch._cluster(config, plan, tmp_path, lambda text: lines.append((text, handles_signal(os.getpid())))),
    ):
        pass
    # docs/diagnostics.md: users may send SIGUSR2 after this line.
    assert lines == [(line, True)]
    assert not handles_signal(os.getpid())


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_set_up_on_gpus_waits_for_models_that_share_them(device: str) -> None:
    events: list[str] = []

    def member(name: str, processes: int) -> Any:
        def set_up(context: object, visible: list[object]) -> dict[str, object]:
            events.append(f"begin {name}")
            return {name: None}

        visible = SimpleNamespace(results=lambda: [*"01234567"])
        return SimpleNamespace(set_up=set_up, processes=[None] * processes, watch=watch, call=lambda method: visible)

    watch = SimpleNamespace(get=lambda starts: events.append("wait " + "+".join(starts)))
    watch.get_started = lambda starts: events.append("wait " + "+".join(starts))
    config = Config()
    config.cluster.device, config.cluster.gpus_per_node = device, 8
    placement = plan_processes(config, {"critic rank": Guests("critic", 2)}, with_engines=False).placement
    trainers = member("trainers", 8)
    trainers.stages, trainers.free_cache = launch.Stages(), lambda: None
    processes = launch.RunProcesses(trainers, None, {"critic": member("critic", 2)})
    roles: Any = [SimpleNamespace(guests=Guests("critic", 2))]
    context: Any = SimpleNamespace(config=config)
    launch._set_up(context, placement, roles, processes, lambda _: None, lambda _: None)
    first = ["begin critic", *(["wait critic"] if device == "cuda" else []), "begin trainers", "wait trainers"]
    assert events == [*first, "wait critic"]
    assert trainers.stages.free_cache is (trainers.free_cache if device == "cuda" else None)


def test_counted_lists_kinds_that_have_processes(plan: ProcessPlan) -> None:
    assert launch._counted(plan) == "8 trainer ranks, 4 rollout engines, 2 critic processes"
    supervised = plan_processes(Config(), {}, with_engines=False)
    assert launch._counted(supervised) == "1 trainer rank"
