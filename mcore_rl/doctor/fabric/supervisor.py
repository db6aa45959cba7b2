"""One node's part in the test: starts its ranks and watches over them. Node 0 also leads all ranks through the stages.

Nothing here waits without a deadline, and no rank outlives its supervisor.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from mcore_rl.doctor.fabric.bench import num_slots
from mcore_rl.doctor.fabric.board import Address, Board
from mcore_rl.doctor.fabric.plan import Fabric, Stage, stages
from mcore_rl.doctor.fabric.processes import Ranks
from mcore_rl.doctor.fabric.rank import Hinder, unhindered
from mcore_rl.doctor.fabric.report import Report
from mcore_rl.doctor.fabric.verdict import Answer, Figure, Offer, Problem, failing, figures_of, slow, unfit
from mcore_rl.errors import McoreRLError

POLL_SECONDS = 0.1
START_TIMEOUTS = 3
"""How many stage deadlines the nodes have to meet, and ranks to start: both load torch, maybe from a slow disk."""
SECONDS_TO_SETTLE = 3.0
"""How long, once a rank that others communicate with has failed, word of who died may take to come."""
SECONDS_TO_PART = 10.0
"""How long node 0 keeps the report for the others."""


@dataclass(frozen=True)
class Place:
    """Which node this is. `listener` is that of board.listen, on node 0; `hosts` names all nodes where they are known,
    else they are known by what they say of themselves."""

    index: int
    num_nodes: int
    host: str
    address: Address
    listener: socket.socket | None = None
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """Of each stage, and of what counts as slow: below so many percent of the others' median."""

    timeout_seconds: float = 120
    slow_percent: float = 80


def supervise(place: Place, slots: int | None, limits: Limits, hinder: Hinder = unhindered) -> Report:
    """Takes part in a test; returns its report, the same on every node. `slots`: ranks of each node, None for all GPUs.

    Collective: all nodes.
    Raises: McoreRLError when node 0 does not answer.
    """
    board = Board(place.address, START_TIMEOUTS * limits.timeout_seconds, place.listener)
    offer = Offer(place.host, *num_slots(slots))
    board.post(f"node {place.index}", json.dumps(asdict(offer)))
    if place.index == 0:
        return _lead(board, place, slots, limits, hinder)
    fabric = _wait_for_fabric(board, limits)
    if fabric is not None:
        _follow(board, place, fabric, limits, hinder)
    report = Report.from_note(board.read("report") or "")
    board.post(f"seen {place.index}", "")
    return report


def _lead(board: Board, place: Place, slots: int | None, limits: Limits, hinder: Hinder) -> Report:
    offers = _gather(board, place, limits)
    hosts = tuple(
        offers[node].host if node in offers else (place.hosts[node] if place.hosts else f"node {node}")
        for node in range(place.num_nodes)
    )
    fabric, problems = unfit(offers, hosts, slots, START_TIMEOUTS * limits.timeout_seconds)
    figures: list[Figure] = []
    if not problems:
        board.post("fabric", json.dumps(asdict(fabric)))
        with Ranks(board, place.index, fabric, limits.timeout_seconds, hinder) as ranks:
            figures, problems = _conduct(board, fabric, limits, ranks.post_deaths)
    report = Report(fabric, board.read("device") or fabric.device, tuple(figures), tuple(problems))
    board.post("report", report.to_note())
    others = [node for node in offers if node != 0]
    _poll(lambda: all(board.read(f"seen {node}") is not None for node in others), SECONDS_TO_PART)
    return report


def _gather(board: Board, place: Place, limits: Limits) -> dict[int, Offer]:
    """What every node that has come in time offers."""
    offers: dict[int, Offer] = {}

    def all_are_there() -> bool:
        for node in range(place.num_nodes):
            if node not in offers and (note := board.read(f"node {node}")):
                offers[node] = Offer(**json.loads(note))
        return len(offers) == place.num_nodes

    _poll(all_are_there, START_TIMEOUTS * limits.timeout_seconds)
    return offers


def _wait_for_fabric(board: Board, limits: Limits) -> Fabric | None:
    """None where the test ends before it begins."""
    longest = 2 * START_TIMEOUTS * limits.timeout_seconds
    if not _poll(lambda: any(map(board.read, ("fabric", "report"))), longest):
        raise McoreRLError(f"node 0 of the fabric test has not begun within {longest:g} s")
    note = board.read("fabric")
    if note is None:
        return None
    fields = json.loads(note)
    return Fabric(**fields | {"hosts": tuple(fields["hosts"])})


def _follow(board: Board, place: Place, fabric: Fabric, limits: Limits, hinder: Hinder) -> None:
    """Until node 0 has the report."""

    def is_over() -> bool:
        ranks.post_deaths()
        return board.read("report") is not None

    with Ranks(board, place.index, fabric, limits.timeout_seconds, hinder) as ranks:
        longest = (len(stages(fabric)) + START_TIMEOUTS) * limits.timeout_seconds
        if not _poll(is_over, longest):
            raise McoreRLError(f"node 0 of the fabric test has not come to an end within {longest:g} s")


def _conduct(
    board: Board, fabric: Fabric, limits: Limits, watch: Callable[[], None]
) -> tuple[list[Figure], list[Problem]]:
    """Runs the stages one by one, and none after one that failed: its ranks might be waited for in vain."""
    figures: list[Figure] = []
    problems: list[Problem] = []
    plan = stages(fabric)
    for number, stage in enumerate(plan):
        board.post(f"go {number}", "")
        timeout = limits.timeout_seconds * (1 if number else START_TIMEOUTS)
        answers = _collect(board, number, stage, fabric, timeout_seconds=timeout, watch=watch)
        figures += figures_of(stage, fabric, answers)
        problems += failing(stage, fabric, answers, timeout)
        if problems:
            break
    for name, subject in {stage.name: stage.subject for stage in plan}.items():
        measured = [figure for figure in figures if figure.stage == name]
        problems += slow(subject, measured, fabric, limits.slow_percent)
    return figures, problems


def _collect(
    board: Board, number: int, stage: Stage, fabric: Fabric, *, timeout_seconds: float, watch: Callable[[], None]
) -> Mapping[int, Answer]:
    """The answers that come before the deadline; soon after a failure that others wait for in vain, what is there."""
    answers: dict[int, Answer] = {}
    began = time.monotonic()
    broken: float | None = None
    while len(answers) < fabric.num_ranks and time.monotonic() - began < timeout_seconds:
        watch()
        for rank in set(range(fabric.num_ranks)) - answers.keys():
            if note := board.read(f"answer {number} {rank}"):
                answers[rank] = Answer(**json.loads(note))
            elif cause := board.read(f"death {rank}"):
                answers[rank] = Answer(error=cause, died=True)
        if stage.groups and broken is None and any(answer.error for answer in answers.values()):
            broken = time.monotonic()
        if broken is not None and time.monotonic() - broken > SECONDS_TO_SETTLE:
            break
        time.sleep(POLL_SECONDS)
    return answers


def _poll(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    """Whether it has come true in time."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
