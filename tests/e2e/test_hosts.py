"""Runs over two hosts, each with its own network, name, and /dev/shm, equal runs on one host for every placement."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.engines import DIVIDED_BY_TWO, WITH_SGLANG
from tests.e2e.hosts import ADDRESS, TwoHosts, two_hosts
from tests.e2e.runs import ALPHABET, TrainProcess, assert_greedy_responses, metrics, train, write_task
from tests.e2e.test_judge_run import write_judge
from tests.e2e.test_reward_model_run import write_scorer
from tests.selection import EVERY_TEST
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAYS = {
    "engine on a host of its own": ("cluster.placement=disaggregated", "rollout.nodes=1", "cluster.gpus_per_node=2"),
    "an engine on each host": ("cluster.gpus_per_node=1", "rollout.num_engines=2"),
    "one engine over both hosts": ("cluster.gpus_per_node=1", "rollout.tp=2"),
}
"""Placements. The trainer's two expert-parallel ranks are on host A in the first, else on different hosts."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as running:
        yield running


class HostsRun(TrainProcess):
    """`mcore-rl train` on host A."""

    hosts: TwoHosts

    def command(self) -> list[str]:
        return self.hosts.command("A", *super().command())


def start(hosts: TwoHosts, task: Path, run_dir: Path, *overrides: str) -> HostsRun:
    run = HostsRun(task, run_dir, ("cluster.nodes=2", f"cluster.address={ADDRESS}", *overrides))
    run.hosts = hosts
    run.environment |= {"TWO_HOSTS": hosts.name}
    return run


def assert_steps_of_one_host(run_dir: Path, one_host: Path, way: str) -> None:
    """Check that the recorded steps have the metrics of a run on one host."""
    engines = 2 if "rollout.num_engines=2" in WAYS[way] else 1
    whole = metrics(one_host)
    for step, row in metrics(run_dir).items():
        for name, value in whole[step].items():
            if name == "weights/tensors_verified":
                assert row[name] == engines * value
            elif name.startswith("rollout/") and "rollout.tp=2" in WAYS[way]:
                # rounding: the tp=2 engine adds partial sums of log-probabilities in another order
                assert row[name] == pytest.approx(value, abs=2e-5), (step, name)
            else:
                assert row[name] == value, (step, name)


@pytest.mark.on_demand  # the run before the usual fault has one engine over both hosts
@pytest.mark.parametrize("way", WAYS)
def test_a_run_over_two_hosts_is_the_run_on_one(
    hosts: TwoHosts, task: Path, whole_run: Path, tmp_path: Path, way: str
) -> None:
    before = {host: hosts.shared_memory(host) for host in "AB"}
    run_dir, exported = tmp_path / "run", tmp_path / "exported"
    with start(hosts, task, run_dir, *WAYS[way], f"trainer.export_hf={exported}") as run:
        assert run.finish() == 0, run.text()[-6000:]
        assert not run.left_after(30)
    assert_steps_of_one_host(run_dir, whole_run, way)
    assert metrics(run_dir).keys() == metrics(whole_run).keys()
    assert_greedy_responses(run_dir, 4, exported)
    assert {host: hosts.shared_memory(host) for host in "AB"} == before


@pytest.mark.on_demand  # messages are compared bit for bit in tests/unit/weights/delta
def test_run_with_deltas_and_a_lost_engine_is_the_run_on_one_host(hosts: TwoHosts, task: Path, tmp_path: Path) -> None:
    """The learning rate changes only the smallest float32 weights."""
    run_dir, one_host = tmp_path / "run", tmp_path / "one_host"
    overrides = ("actor.optimizer.lr=2e-9", "trainer.steps=4")
    train(task, one_host, *overrides)
    deltas = (*WAYS["engine on a host of its own"], "weights.delta=true", "checkpoint.every_steps=1")
    with start(hosts, task, run_dir, *overrides, *deltas) as run:
        run.wait_until(lambda: (run_dir / "checkpoints" / "step_2").is_dir())
        hosts.signal("B", "ray::EngineProcess", signal.SIGKILL)
        assert run.finish() == 0, run.text()[-6000:]
        assert "it starts again (1 of 3 times)" in run.text()
        assert not run.left_after(30)
    rows, whole = metrics(run_dir), metrics(one_host)
    for step, row in whole.items():
        for name, value in row.items():
            if not name.startswith(("rollout/", "weights/", "engine/")):
                assert rows[step][name] == value, (step, name)
    shares = [row["weights/delta_share"] for row in rows.values()]
    assert shares[0] > 1 > 0.7 > min(shares), shares  # the first sync is whole


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task whose model is divisible by two SGLang ranks."""
    task = write_task(tmp_path_factory.mktemp("divided"))
    sizes = {"vocab_size": len(ALPHABET) + 3, "eos_token_id": 1, **DIVIDED_BY_TWO}
    write_tiny_model(task.parent / "model", "qwen3_moe", std=0.06, **sizes)
    return task


@pytest.fixture(scope="module")
def of_vllm(divided: Path) -> dict[int, dict[str, float]]:
    """Metrics of a run with vLLM on one host."""
    train(divided, divided.parent / "one_host", "trainer.steps=2")
    return metrics(divided.parent / "one_host")


@WITH_SGLANG
@pytest.mark.on_demand
@pytest.mark.parametrize("way", ["an engine on each host", "one engine over both hosts"])
def test_a_step_with_sglang_over_two_hosts_is_the_step_with_vllm_on_one(
    hosts: TwoHosts, divided: Path, of_vllm: dict[int, dict[str, float]], tmp_path: Path, way: str
) -> None:
    with start(hosts, divided, tmp_path / "run", *WAYS[way], "rollout.engine=sglang", "trainer.steps=2") as run:
        assert run.finish() == 0, run.text()[-6000:]
        assert not run.left_after(30)
    ours = metrics(tmp_path / "run")
    assert {name: ours[1][name] for name in of_vllm[1]} == pytest.approx(of_vllm[1], abs=1e-4)
    engines, verified = 2 if way == "an engine on each host" else 1, "weights/tensors_verified"
    assert ours[2][verified] == engines * of_vllm[2][verified] > 0
    assert {host: hosts.shared_memory(host) for host in "AB"} == {"A": set(), "B": set()}


FAULTS = {
    "an engine rank on the other host dies": ("VLLM", "kill"),
    "the process that follows the leader dies": ("ray::FollowerProcess", "kill"),
    "a trainer rank on the other host dies": ("ray::TrainerProcess", "kill"),
    "an engine rank on the other host stops": ("VLLM", "stop"),
    "the link is cut": ("", "cut"),
}
"""Title of a process on host B, and the fault to inject."""
USUAL = ("an engine rank on the other host dies",)


ENDED = ("ray::TrainerProcess", "ray::EngineProcess", "ray::FollowerProcess", "VLLM", "sglang.rank")
"""Titles of processes that a run leaves on no host."""


@pytest.mark.on_demand
@pytest.mark.parametrize(
    ("engine", "title"),
    [
        ("vllm", "VLLM"),
        ("vllm", "ray::FollowerProcess"),
        pytest.param("sglang", "mcore_rl.engines.sglang.rank", marks=WITH_SGLANG),
    ],
)
def test_an_engine_over_both_hosts_starts_again_to_the_same_run(
    hosts: TwoHosts, divided: Path, tmp_path: Path, engine: str, title: str
) -> None:
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    overrides = (*WAYS["one engine over both hosts"], f"rollout.engine={engine}", "checkpoint.every_steps=1")
    with start(hosts, divided, run_dir, *overrides) as run:
        run.wait_until(lambda: (run_dir / "checkpoints" / "step_2").is_dir())
        hosts.signal("B", title, signal.SIGKILL)
        assert run.finish() == 0, run.text()[-4000:]
        assert "it starts again (1 of 3 times)" in run.text()
    figures = metrics(run_dir)
    assert sum(row.get("engine/restarts", 0) for row in figures.values()) == 1
    if engine == "vllm":
        train(divided, whole)
        for name, value in metrics(whole)[4].items():
            if not name.startswith(("rollout/", "weights/", "engine/")):
                assert figures[4][name] == value, name
    hosts.wait_until_none(*ENDED)
    assert {host: hosts.shared_memory(host) for host in "AB"} == {"A": set(), "B": set()}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.on_demand] * (name not in USUAL)) for name in FAULTS]
)
def test_a_fault_ends_the_run_in_time_and_leaves_nothing(
    hosts: TwoHosts, task: Path, whole_run: Path, tmp_path: Path, fault: str
) -> None:
    """The steps before the fault equal those on one host."""
    run_dir, timeout, way = tmp_path / "run", 12, "one engine over both hosts"
    overrides = (
        *WAYS[way],
        f"cluster.collective_timeout_seconds={timeout}",
        "checkpoint.every_steps=1",
        "rollout.max_engine_restarts=0",
    )
    title, what = FAULTS[fault]
    with start(hosts, task, run_dir, *overrides) as run:
        run.wait_until(lambda: (run_dir / "checkpoints" / "step_2").is_dir())
        if what == "cut":
            hosts.call("A", "ip", "link", "set", "veth0", "down")
        else:
            hosts.signal("B", title, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        try:
            code = run.finish(90)
            assert code == 1, run.text()[-4000:]
        finally:
            if what == "cut":
                hosts.call("A", "ip", "link", "set", "veth0", "up")
        said = run.text()
    assert "Traceback" not in said
    assert "host-b" in said or "10.213.7.2" in said, said[-3000:]
    hosts.wait_until_none(*ENDED)
    assert {host: hosts.shared_memory(host) for host in "AB"} == {"A": set(), "B": set()}
    assert {0, 1, 2} <= metrics(run_dir).keys()
    assert_steps_of_one_host(run_dir, whole_run, way)
    # Ray declares an unreachable host dead and does not accept it again.
    if what == "cut" or not EVERY_TEST:
        return
    with start(hosts, task, run_dir, *overrides) as run:
        assert run.finish() == 0, run.text()[-6000:]
    figures = metrics(run_dir)[4]
    for name, value in metrics(whole_run)[4].items():
        if not name.startswith(("rollout/", "weights/")):
            assert figures[name] == value, name


@pytest.mark.on_demand  # the delivery of trajectories and the placement have unit tests, and each role runs on one host
def test_critic_reward_model_and_judge_run_over_two_hosts_as_on_one(
    hosts: TwoHosts, task: Path, tmp_path: Path
) -> None:
    """Each host has one rank of each model, one of the judge's engines, and one of the policy's engines."""
    scorer, judge = write_scorer(task, "scorer", None), tmp_path / "judge"
    write_judge(judge)
    template = json.dumps("{prompt}{response}:")
    overrides = (
        "trainer.steps=2",
        "algorithm.advantage=gae",
        "algorithm.kl.in_reward=0.05",
        "critic.num_ranks=2",
        "critic.optimizer.lr=1e-3",
        f"reward_model.hf_path={scorer}",
        f"judge.hf_path={judge}",
        f"judge.template={template}",
        "judge.num_engines=2",
        "judge.max_prompt_tokens=24",
        "judge.max_response_tokens=12",
        "judge.kv_cache_gib=0.03",
        "reward.overlong.enable=false",
        "rollout.num_engines=2",
    )
    train(task, tmp_path / "one", *overrides)
    with start(hosts, task, tmp_path / "two", *overrides, "cluster.gpus_per_node=1") as run:
        assert run.finish() == 0, run.text()[-6000:]
    ours, one_host = metrics(tmp_path / "two"), metrics(tmp_path / "one")
    assert {"critic/loss", "reward/model", "reward/judge"} <= one_host[2].keys()
    assert ours == one_host
