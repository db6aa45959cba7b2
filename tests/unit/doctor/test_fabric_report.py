"""Slow and failing ranks, and the nodes to blame."""

from __future__ import annotations

import json

import pytest

from mcore_rl.doctor.fabric.plan import Fabric, Stage, StageResult, stages
from mcore_rl.doctor.fabric.report import FabricProblem, FabricReport, Figure, figures_of, find_failures, find_slow
from mcore_rl.doctor.fabric.supervisor import Offer, plan_fabric

FOUR = Fabric(("n1", "n2", "n3", "n4"), 1, "cuda")
TWO_BY_TWO = Fabric(("n1", "n2"), 2, "cuda")
PRODUCT, IN_NODE, LINK = "matrix product", "all-reduce in a node", "all-reduce between two nodes"


def stages_of(fabric: Fabric, name: str) -> list[Stage]:
    return [stage for stage in stages(fabric) if stage.name == name]


def slow(fabric: Fabric, name: str, values: dict[tuple[int, ...], float]) -> list[FabricProblem]:
    """Verdict on a measurement in which the given groups have these values and all others 100."""
    figures: list[Figure] = []
    for stage in stages_of(fabric, name):
        results = {rank: StageResult(values.get(group, 100.0)) for group in stage.groups for rank in group}
        figures += figures_of(stage, results)
    return find_slow(figures, fabric, 80)


def test_slow_device_is_named_with_the_median_of_the_others() -> None:
    (problem,) = slow(TWO_BY_TWO, PRODUCT, {(3,): 56.0})
    assert str(problem) == "slow: matrix product: rank 3 (n2, GPU 1): 56 TFLOP/s, 56 % of the others' 100"
    assert (problem.nodes, problem.value, problem.median_of_others) == (("n2",), 56.0, 100.0)


def test_slow_means_below_the_threshold() -> None:
    assert slow(TWO_BY_TWO, PRODUCT, {(0,): 80.0}) == []
    assert len(slow(TWO_BY_TWO, PRODUCT, {(0,): 79.9})) == 1
    assert slow(Fabric(("n1",), 1, "cuda"), PRODUCT, {(0,): 1.0}) == []  # nothing to compare with


def test_slower_one_of_two_nodes_is_named() -> None:
    (problem,) = slow(TWO_BY_TWO, IN_NODE, {(2, 3): 50.0})
    assert (problem.subject, problem.nodes) == ("n2 (ranks 2-3)", ("n2",))


def test_slow_link_blames_neither_of_its_nodes() -> None:
    (problem,) = slow(FOUR, LINK, {(1, 2): 10.0})
    assert (problem.subject, problem.nodes) == ("n2 - n3, GPU 0", ())


def test_node_with_two_slow_links_is_blamed() -> None:
    *links, node = slow(FOUR, LINK, {(1, 2): 10.0, (2, 3): 10.0})
    assert [link.nodes for link in links] == [(), ()]
    assert (node.subject, node.reason, node.nodes) == ("n3", "slow in both of its pairs", ("n3",))


def test_slow_devices_of_one_pair_count_as_one_link() -> None:
    three = Fabric(("n1", "n2", "n3"), 2, "cuda")
    assert {problem.nodes for problem in slow(three, LINK, {(0, 2): 10.0, (1, 3): 10.0})} == {()}


WELL, RAISED = StageResult(1.0), StageResult(error="RuntimeError: x")
DIED = StageResult(error="its process died of SIGKILL", died=True)


@pytest.mark.parametrize(
    ("name", "results", "named"),
    [
        (PRODUCT, {0: WELL, 1: RAISED, 2: DIED}, [(1,), (2,), (3,)]),  # independent ranks
        (IN_NODE, {0: RAISED, 1: DIED, 2: WELL, 3: WELL}, [(1,)]),  # 0 lost its connection to 1
        (IN_NODE, {0: RAISED, 2: WELL, 3: WELL}, [(0,)]),  # 1 waits for 0
        (IN_NODE, {0: WELL, 1: WELL}, [(2, 3)]),
        (IN_NODE, {0: RAISED}, [(0,), (2, 3)]),
        (LINK, {0: WELL, 2: WELL}, [(1, 3)]),
        (LINK, dict.fromkeys(range(4), WELL), []),
    ],
)
def test_failure_names_its_cause(name: str, results: dict[int, StageResult], named: list[tuple[int, ...]]) -> None:
    problems = find_failures(stages_of(TWO_BY_TWO, name)[0], TWO_BY_TWO, results, 60)
    assert [problem.ranks for problem in problems] == named
    assert all(problem.nodes == tuple(dict.fromkeys(map(TWO_BY_TWO.host_of, problem.ranks))) for problem in problems)


def test_group_figure_is_the_lowest_of_a_complete_group() -> None:
    (stage,) = stages_of(TWO_BY_TWO, IN_NODE)
    (figure,) = figures_of(stage, {0: WELL, 2: WELL, 3: StageResult(0.5)})
    assert (figure.ranks, figure.value) == ((2, 3), 0.5)


def test_absent_and_incomplete_nodes_are_named() -> None:
    offers = {0: Offer("a", "cuda", 8), 1: Offer("b", "cuda", 7), 2: Offer("c", "cpu", 1)}
    fabric, problems = plan_fabric(offers, ["a", "b", "c", "d"], None, 60)
    assert (fabric.slots, fabric.device) == (8, "cuda")
    assert [(problem.subject, problem.reason) for problem in problems] == [
        ("b", "has 7 cuda slots, not 8 of cuda"),
        ("c", "has 1 cpu slots, not 8 of cuda"),
        ("d", "did not join within 60 s"),
    ]


def test_simulated_nodes_of_one_machine_have_unique_names() -> None:
    fabric, problems = plan_fabric(dict.fromkeys(range(2), Offer("box", "cpu", 2)), ["box", "box"], 2, 60)
    assert (fabric.hosts, problems) == (("box/0", "box/1"), [])


def report(*problems: FabricProblem) -> FabricReport:
    figures = [Figure("copy", "GiB/s", TWO_BY_TWO.rank_name(rank), (rank,), 10.0 + rank) for rank in range(4)]
    return FabricReport(TWO_BY_TWO, "H100", figures, list(problems))


def test_text_has_median_minimum_and_blamed_node() -> None:
    text = report(*slow(TWO_BY_TWO, PRODUCT, {(3,): 56.0})).as_text()
    assert "nodes: 2, GPUs per node: 2 (H100)" in text
    assert [line.split() for line in text.splitlines() if line.startswith("copy")] == [
        "copy 11.5 GiB/s lowest 10: rank 0 (n1, GPU 0)".split()
    ]
    assert text.endswith("56 % of the others' 100\nto blame: n2")
    assert report().as_text().endswith("fabric: all well")


def test_blame_prefers_failures_over_slowness() -> None:
    problems = [
        *slow(TWO_BY_TWO, PRODUCT, {(3,): 56.0}),
        *find_failures(stages_of(TWO_BY_TWO, PRODUCT)[0], TWO_BY_TWO, {0: WELL, 1: WELL}, 5),
    ]
    assert {host: problem.kind for host, problem in report(*problems).blamed().items()} == {"n2": "failing"}


def test_json_has_names_of_nodes() -> None:
    shown = json.loads(report(*slow(TWO_BY_TWO, PRODUCT, {(3,): 56.0})).as_json())
    assert (shown["ok"], shown["nodes"], shown["blamed"]) == (False, ["n1", "n2"], ["n2"])
    assert shown["problems"][0]["nodes"] == ["n2"]
    last = {"stage": "copy", "unit": "GiB/s", "subject": "rank 3 (n2, GPU 1)", "ranks": [3], "value": 13.0}
    assert shown["figures"][3] == last
