"""Who is slow, who fails, and which node is to blame for it."""

from __future__ import annotations

import json

import pytest

from mcore_rl.doctor.fabric.plan import Fabric, Stage, Subject, stages
from mcore_rl.doctor.fabric.report import Report, as_json, as_text
from mcore_rl.doctor.fabric.verdict import Answer, Figure, Offer, Problem, failing, figures_of, slow, unfit

FOUR = Fabric(("n1", "n2", "n3", "n4"), 1, "cuda")
TWO_BY_TWO = Fabric(("n1", "n2"), 2, "cuda")


def stages_of(fabric: Fabric, subject: Subject) -> list[Stage]:
    return [stage for stage in stages(fabric) if stage.subject is subject and stage.unit]


def judged(fabric: Fabric, subject: Subject, values: dict[tuple[int, ...], float]) -> list[Problem]:
    """The verdict on all measurements of a subject, in which groups reach these values and all others 100."""
    figures: list[Figure] = []
    measured = [stage for stage in stages_of(fabric, subject) if stage.name == stages_of(fabric, subject)[0].name]
    for stage in measured:
        groups = stage.groups or [(rank,) for rank in range(fabric.num_ranks)]
        answers = {rank: Answer(values.get(group, 100.0)) for group in groups for rank in group}
        figures += figures_of(stage, fabric, answers)
    return slow(subject, figures, fabric, 80)


def test_a_slow_device_is_named_beside_the_others() -> None:
    (problem,) = judged(TWO_BY_TWO, Subject.DEVICE, {(3,): 56.0})
    assert str(problem) == "slow: matrix product: rank 3 (n2, GPU 1): 56 TFLOP/s, 56 % of the others' 100"
    assert (problem.nodes, problem.value, problem.median_of_others) == ((1,), 56.0, 100.0)


def test_slow_is_below_the_threshold_and_not_at_it() -> None:
    assert judged(TWO_BY_TWO, Subject.DEVICE, {(0,): 80.0}) == []
    assert len(judged(TWO_BY_TWO, Subject.DEVICE, {(0,): 79.9})) == 1


def test_one_figure_alone_is_compared_with_nothing() -> None:
    assert judged(Fabric(("n1",), 1, "cuda"), Subject.DEVICE, {(0,): 1.0}) == []


def test_of_two_the_slower_is_named() -> None:
    (problem,) = judged(TWO_BY_TWO, Subject.NODE, {(2, 3): 50.0})
    assert (problem.subject, problem.nodes) == ("n2 (ranks 2-3)", (1,))


def test_a_slow_link_blames_neither_of_its_nodes() -> None:
    (problem,) = judged(FOUR, Subject.LINK, {(1, 2): 10.0})
    assert (problem.subject, problem.nodes) == ("n2 - n3, GPU 0", ())


def test_a_node_both_of_whose_links_are_slow_is_to_blame() -> None:
    *links, node = judged(FOUR, Subject.LINK, {(1, 2): 10.0, (2, 3): 10.0})
    assert [link.nodes for link in links] == [(), ()]
    assert (node.subject, node.reason, node.nodes) == ("n3", "slow in both of its pairs", (2,))


def test_several_slow_devices_of_one_pair_are_one_pair() -> None:
    three = Fabric(("n1", "n2", "n3"), 2, "cuda")
    assert {problem.nodes for problem in judged(three, Subject.LINK, {(0, 2): 10.0, (1, 3): 10.0})} == {()}


COMPUTING, IN_NODE, BETWEEN = (stages_of(TWO_BY_TWO, s)[0] for s in (Subject.DEVICE, Subject.NODE, Subject.LINK))
WELL, RAISED, DIED = (
    Answer(1.0),
    Answer(error="RuntimeError: x"),
    Answer(error="its process died of SIGKILL", died=True),
)


@pytest.mark.parametrize(
    ("stage", "answers", "named"),
    [
        (COMPUTING, {0: WELL, 1: RAISED, 2: DIED}, [(1,), (2,), (3,)]),  # they do not wait for each other
        (IN_NODE, {0: RAISED, 1: DIED}, [(1,)]),  # the connection to who died was lost
        (IN_NODE, {0: RAISED}, [(0,)]),  # the others wait for it
        (IN_NODE, {0: WELL, 1: WELL}, [(2, 3)]),
        (BETWEEN, {0: WELL, 2: WELL}, [(1, 3)]),
        (BETWEEN, {}, [(0, 2), (1, 3)]),
        (BETWEEN, dict.fromkeys(range(4), WELL), []),
    ],
)
def test_the_cause_of_a_failure_is_named(
    stage: Stage, answers: dict[int, Answer], named: list[tuple[int, ...]]
) -> None:
    problems = failing(stage, TWO_BY_TWO, answers, 60)
    assert [problem.ranks for problem in problems] == named
    assert all(problem.nodes == tuple(sorted({rank // 2 for rank in problem.ranks})) for problem in problems)


def test_a_rank_without_a_part_that_hangs_is_named_by_itself() -> None:
    stage = Stage("s", "all_reduce", Subject.LINK, "GiB/s", ((0, 1),))
    (problem,) = failing(stage, FOUR, {0: WELL, 1: WELL, 3: Answer()}, 60)
    assert str(problem) == "failing: s: rank 2 (n3, GPU 0): no answer within 60 s"


def test_a_group_without_all_its_figures_has_none() -> None:
    assert [figure.ranks for figure in figures_of(IN_NODE, TWO_BY_TWO, {0: WELL, 2: WELL, 3: Answer(0.5)})] == [(2, 3)]
    assert figures_of(IN_NODE, TWO_BY_TWO, {2: WELL, 3: Answer(0.5)})[0].value == 0.5


def test_nodes_that_are_absent_or_lack_devices_are_named() -> None:
    offers = {0: Offer("a", "cuda", 8), 1: Offer("b", "cuda", 7), 2: Offer("c", "cpu", 1)}
    fabric, problems = unfit(offers, ["a", "b", "c", "d"], None, 60)
    assert (fabric.slots, fabric.device) == (8, "cuda")
    assert [(problem.subject, problem.reason) for problem in problems] == [
        ("b", "has 7 cuda slots, not 8 of cuda"),
        ("c", "has 1 cpu slots, not 8 of cuda"),
        ("d", "has not come within 60 s"),
    ]


def test_pretended_nodes_of_one_machine_have_names_of_their_own() -> None:
    fabric, problems = unfit(dict.fromkeys(range(2), Offer("box", "cpu", 2)), ["box", "box"], 2, 60)
    assert (fabric.hosts, problems) == (("box/0", "box/1"), [])


def report(*problems: Problem) -> Report:
    figures = [Figure("copy", "GiB/s", TWO_BY_TWO.rank_name(rank), (rank,), 10.0 + rank) for rank in range(4)]
    return Report(TWO_BY_TWO, "H100", tuple(figures), problems)


def test_the_text_has_the_median_the_lowest_and_who_is_to_blame() -> None:
    text = as_text(report(*judged(TWO_BY_TWO, Subject.DEVICE, {(3,): 56.0})))
    assert "nodes: 2, GPUs per node: 2 (H100)" in text
    assert [line.split() for line in text.splitlines() if line.startswith("copy")] == [
        "copy 11.5 GiB/s lowest 10: rank 0 (n1, GPU 0)".split()
    ]
    assert text.endswith("56 % of the others' 100\nto blame: n2")
    assert as_text(report()).endswith("fabric: all well")


def test_a_failure_comes_before_slowness_in_what_a_node_is_blamed_for() -> None:
    problems = [
        *judged(TWO_BY_TWO, Subject.DEVICE, {(3,): 56.0}),
        *failing(COMPUTING, TWO_BY_TWO, {0: WELL, 1: WELL}, 5),
    ]
    assert {host: problem.kind for host, problem in report(*problems).blamed().items()} == {"n2": "failing"}


def test_reports_travel_as_text_and_are_json() -> None:
    sent = report(*judged(TWO_BY_TWO, Subject.DEVICE, {(3,): 56.0}))
    assert Report.from_note(sent.to_note()) == sent
    shown = json.loads(as_json(sent))
    assert (shown["ok"], shown["nodes"], shown["blamed"]) == (False, ["n1", "n2"], ["n2"])
    assert shown["problems"][0]["nodes"] == ["n2"]
    last = {"stage": "copy", "unit": "GiB/s", "subject": "rank 3 (n2, GPU 1)", "ranks": [3], "value": 13.0}
    assert shown["figures"][3] == last
