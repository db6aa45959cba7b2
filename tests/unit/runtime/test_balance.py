"""Policy of the scheduler's queue: least loaded engine first, room, losses, and steals."""

from __future__ import annotations

from mcore_rl.runtime.engines.balance import EngineKey, LoadBalancer

ENGINES = [EngineKey(number) for number in range(3)]
FIRST, SECOND, THIRD = ENGINES


class Reports:
    """Received requests of engines, as their reports count them."""

    def __init__(self, balance: LoadBalancer) -> None:
        self.balance, self.received = balance, dict.fromkeys(ENGINES, 0)

    def assign(self) -> dict[EngineKey, list[int]]:
        given = self.balance.assign()
        for engine, numbers in given.items():
            self.received[engine] += sum(self.balance.pieces[number].num_requests for number in numbers)
        return given

    def report(self, engine: EngineKey, left: int, *finished: int) -> None:
        for number in finished:
            self.balance.finished(number)
        self.balance.report(engine, self.received[engine], left)


def reports(num_engines: int, room: int | None, sizes: list[int], *, steals: bool = True) -> Reports:
    """One task per size; all engines are candidates without work."""
    made = LoadBalancer(room, steals=steals)
    for task, size in enumerate(sizes):
        made.add(task, 0, size)
    for engine in ENGINES[:num_engines]:
        made.join(engine)
    return Reports(made)


def test_assign_prefers_the_engine_with_fewest_requests() -> None:
    assert reports(2, 100, [50, 20, 20, 20, 5]).assign() == {FIRST: [0, 4], SECOND: [1, 2, 3]}


def test_assign_gives_an_even_share_at_once_if_engines_may_steal() -> None:
    made = reports(2, 4, [2] * 7)
    assert made.assign() == {FIRST: [0, 2, 4], SECOND: [1, 3, 5]}
    made.report(SECOND, 1, 1, 3)
    assert made.assign() == {SECOND: [6]}


def test_assign_gives_an_engine_no_more_pieces_than_threads() -> None:
    made = reports(2, 2, [1] * 9)
    assert made.assign() == {FIRST: [0, 2], SECOND: [1, 3]}
    made.report(FIRST, 0, 0, 2)
    assert made.assign() == {FIRST: [4, 5]}


def test_assign_without_steals_fills_the_room_again_after_reports() -> None:
    made = reports(2, 4, [2] * 7, steals=False)
    assert made.assign() == {FIRST: [0, 2], SECOND: [1, 3]}
    assert made.assign() == {}
    made.report(SECOND, 1, 3)  # one of task 1
    assert made.assign() == {SECOND: [4]}
    made.report(FIRST, 0, 0, 2)
    assert made.assign() == {FIRST: [5, 6]}
    assert not made.balance.queue


def test_candidates_with_work_are_released_and_idle_ones_stay() -> None:
    made = reports(2, 4, [2])
    assert made.assign() == {FIRST: [0]}
    made.report(FIRST, 1)
    assert made.assign() == {FIRST: []}
    made.balance.add(1, 0, 2)
    assert made.assign() == {SECOND: [1]}


def test_piece_larger_than_the_room_gets_an_idle_engine() -> None:
    made = reports(1, 4, [9, 1], steals=False)
    assert made.assign() == {FIRST: [0]}
    made.report(FIRST, 0, 0)
    assert made.assign() == {FIRST: [1]}


def test_pieces_of_a_lost_engine_come_first() -> None:
    made = reports(2, 4, [2] * 5, steals=False)
    assert made.assign() == {FIRST: [0, 2], SECOND: [1, 3]}
    assert made.balance.leave([FIRST]) == [0, 2]
    made.report(SECOND, 0, 1, 3)
    assert made.assign() == {SECOND: [0, 2]}
    made.balance.leave([SECOND])
    assert made.assign() == {}
    made.balance.join(THIRD)
    assert made.assign() == {THIRD: [0, 2]}
    assert made.balance.running_requests == 3 * 2


def test_lost_candidate_gets_nothing() -> None:
    made = reports(2, 4, [2])
    made.balance.leave([FIRST])
    assert made.assign() == {SECOND: [0]}


def test_engine_that_does_not_serve_gets_nothing() -> None:
    made = LoadBalancer(None, serves=lambda engine: engine != FIRST)
    for engine in ENGINES:
        made.join(engine)
    for task in range(4):
        made.add(task, 0, 1)
    assert made.assign() == {SECOND: [0, 2], THIRD: [1, 3]}


def test_without_room_engines_take_pieces_at_any_time() -> None:
    made = reports(2, None, [4, 1, 2])
    assert made.assign() == {FIRST: [0], SECOND: [1, 2]}
    made.balance.add(3, 0, 9)
    assert made.assign() == {SECOND: [3]}
    made.balance.report(SECOND, received=3, left=1)  # the last piece is on its way
    assert made.balance.running_requests == 4 + 1 + 9
    assert made.balance.steal() == []


def test_idle_engine_stays_a_candidate_while_others_may_give_up_requests() -> None:
    made = reports(3, 8, [4] * 5)  # 4 slots
    balance = made.balance
    assert made.assign() == {FIRST: [0, 3], SECOND: [1, 4], THIRD: [2]}
    assert balance.steal() == []
    made.report(THIRD, 1)
    assert (made.assign(), balance.steal()) == ({}, [(FIRST, 3)])  # three of its four slots are free
    assert (made.assign(), balance.steal()) == ({}, [])  # one steal per candidate
    balance.gave_up(FIRST, [], 0)
    assert (made.assign(), balance.steal()) == ({}, [(SECOND, 3)])
    assert balance.gave_up(SECOND, [(4, 2)], 2) == 2
    assert made.assign() == {THIRD: [5]}
    assert [(piece.first, piece.last) for piece in balance.of_task(4)] == [(0, 2), (2, 4)]
    made.report(FIRST, 3)
    assert (made.assign(), balance.steal()) == ({}, [(SECOND, 1)])
    balance.gave_up(SECOND, [], 0)
    assert (made.assign(), balance.steal()) == ({}, [(THIRD, 1)])
    assert (made.assign(), balance.has_more) == ({}, True)  # the candidate waits for the last victim
    balance.gave_up(THIRD, [], 0)
    assert made.assign() == {FIRST: []}  # nothing is left to get
    assert not balance.has_more


def test_requests_given_during_a_steal_can_be_stolen_later() -> None:
    """The answer may have been sent before the engine received them."""
    made = reports(2, 8, [4, 4])
    assert made.assign() == {FIRST: [0], SECOND: [1]}
    made.report(FIRST, 0)
    assert made.balance.steal() == [(SECOND, 4)]
    made.report(SECOND, 1)
    made.balance.add(2, 0, 3)
    made.balance.add(3, 0, 6)
    assert made.assign() == {FIRST: [2], SECOND: [3]}
    made.balance.gave_up(SECOND, [], 0)
    made.report(FIRST, 0)
    assert made.balance.steal() == [(SECOND, 4)]


def test_one_engine_steals_from_nobody() -> None:
    made = reports(1, 8, [4])
    assert made.assign() == {FIRST: [0]}
    assert not made.balance.has_more


def test_pieces_of_a_task_stay_in_order_when_split() -> None:
    made = LoadBalancer(100)
    made.join(FIRST)
    for task, span in enumerate([(0, 8), (4, 9)]):
        made.add(task, *span)
    assert made.assign() == {FIRST: [0, 1]}
    made._asked[FIRST] = 0
    assert made.gave_up(FIRST, [(1, 6)], 0) == 3
    assert made.assign() == {}
    made.join(SECOND)
    assert made.assign() == {SECOND: [2]}
    made._asked[SECOND] = 0
    assert made.gave_up(SECOND, [(2, 6)], 0) == 3  # all of it, under a new number
    assert (made.of_task(0), made.of_task(1)) == ([made.pieces[0]], [made.pieces[1], made.pieces[3]])
    assert [(piece.first, piece.last) for piece in made.of_task(1)] == [(4, 6), (6, 9)]
    made.drop(1)
    assert list(made.pieces) == [0]
