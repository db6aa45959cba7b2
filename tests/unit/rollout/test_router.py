"""Who gets which task: the engine with the fewest tokens in flight, as long as it has room."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.rollout.router import Router, Work, cut

NOTHING = Work(0, 0.0)


def router(num_engines: int, room: int, works: list[Work]) -> Router:
    router = Router(room)
    for task, work in enumerate(works):
        router.offer(task, work)
    for engine in range(num_engines):
        router.ask(engine, NOTHING)
    return router


@pytest.mark.parametrize(
    ("groups", "engines", "tasks"), [(1, 1, 1), (700, 1, 1), (3, 2, 3), (8, 2, 4), (9, 2, 4), (100, 3, 13)]
)
def test_tasks_are_whole_groups_in_order_and_no_more_requests_than_fill_a_part_of_an_engine(
    groups: int, engines: int, tasks: int
) -> None:
    parts = cut(groups, samples=8, num_engines=engines, num_concurrent=128)
    assert np.concatenate(parts).tolist() == list(range(groups))
    assert all(map(len, parts))
    assert len(parts) == tasks
    assert engines == 1 or max(map(len, parts)) <= 128 // 2 // 8


def test_the_engine_with_the_fewest_tokens_in_flight_is_next() -> None:
    tasks = router(2, 100, [Work(1, tokens) for tokens in (50.0, 20.0, 20.0, 20.0, 5.0)])
    assert tasks.assign() == {0: [0, 4], 1: [1, 2, 3]}


def test_engines_are_filled_evenly_and_get_more_when_they_ask() -> None:
    tasks = router(2, 4, [Work(2, 10.0)] * 7)
    assert tasks.assign() == {0: [0, 2], 1: [1, 3]}
    assert tasks.assign() == {}
    tasks.finished(3, 1)
    tasks.ask(1, Work(1, 5.0))  # of task 1
    assert tasks.assign() == {1: [4]}
    tasks.finished(0, 0)
    tasks.finished(2, 0)
    tasks.ask(0, NOTHING)
    assert (tasks.assign(), tasks.has_waiting) == ({0: [5, 6]}, False)


def test_who_has_work_left_goes_on_with_it_and_who_has_none_goes_on_asking() -> None:
    tasks = router(2, 4, [Work(2, 10.0)])
    assert tasks.assign() == {0: [0]}
    tasks.ask(0, Work(1, 5.0))
    assert tasks.assign() == {0: []}
    tasks.offer(1, Work(2, 10.0))
    assert tasks.assign() == {1: [1]}


def test_a_task_larger_than_an_engines_room_gets_an_engine_of_its_own() -> None:
    tasks = router(1, 4, [Work(9, 90.0), Work(1, 1.0)])
    assert tasks.assign() == {0: [0]}
    tasks.finished(0, 0)
    tasks.ask(0, NOTHING)
    assert tasks.assign() == {0: [1]}


def test_what_a_lost_engine_had_comes_first_and_goes_to_others() -> None:
    tasks = router(2, 4, [Work(2, 10.0)] * 5)
    assert tasks.assign() == {0: [0, 2], 1: [1, 3]}
    tasks.leave(0)
    tasks.finished(1, 1)
    tasks.finished(3, 1)
    tasks.ask(1, NOTHING)
    assert tasks.assign() == {1: [0, 2]}
    tasks.leave(1)
    assert tasks.assign() == {}
    tasks.ask(0, NOTHING)
    assert tasks.assign() == {0: [0, 2]}


def test_an_engine_that_is_lost_while_it_asks_gets_nothing() -> None:
    tasks = router(2, 4, [Work(2, 10.0)])
    tasks.leave(0)
    assert tasks.assign() == {1: [0]}


@pytest.mark.parametrize("seed", range(5))
def test_engines_of_unequal_speed_share_the_work_accordingly(seed: int) -> None:
    """Simulated: engine i takes 1 + i seconds for 1000 tokens, and asks when half of its room is free."""
    random = np.random.default_rng(seed)
    works = [Work(8, float(tokens)) for tokens in random.integers(500, 1500, 400)]
    tasks = router(3, 32, works)
    left: list[list[int]] = [[], [], []]
    clock, done = [0.0] * 3, [0.0] * 3
    while True:
        for engine, given in tasks.assign().items():
            left[engine] += given
        busy = [engine for engine in range(3) if left[engine]]
        if not busy:
            break
        engine = min(busy, key=lambda engine: clock[engine])
        task = left[engine].pop(0)
        clock[engine] += (1 + engine) * works[task].tokens / 1000
        done[engine] += works[task].tokens
        tasks.finished(task, engine)
        if len(left[engine]) == 2 or not left[engine]:
            tasks.ask(engine, Work(8 * len(left[engine]), sum(works[task].tokens for task in left[engine])))
    assert sum(done) == sum(work.tokens for work in works)
    shares = np.array(done) / sum(done)
    assert np.allclose(shares, [6 / 11, 3 / 11, 2 / 11], atol=0.03), shares


def test_who_gets_nothing_asks_on_while_others_may_give_some_up() -> None:
    tasks = router(3, 8, [Work(4, 4.0)] * 5)  # of slots 4
    assert tasks.assign() == {0: [0, 3], 1: [1, 4], 2: [2]}
    assert tasks.steal() == []
    tasks.ask(2, Work(1, 1.0))
    assert (tasks.assign(), tasks.steal()) == ({}, [(0, 3)])  # three slots of its four are free
    assert (tasks.assign(), tasks.steal()) == ({}, [])  # one question for one that asks
    tasks.gave_up(0, 0)
    assert (tasks.assign(), tasks.steal()) == ({}, [(1, 3)])
    tasks.offer(5, Work(2, 2.0), first=True)
    tasks.gave_up(1, 2)
    assert tasks.assign() == {2: [5]}
    tasks.ask(0, Work(3, 3.0))
    assert (tasks.assign(), tasks.steal()) == ({}, [(1, 1)])
    tasks.gave_up(1, 0)
    assert (tasks.assign(), tasks.steal()) == ({}, [(2, 1)])
    tasks.gave_up(2, 0)
    assert tasks.assign() == {0: []}  # nothing is to be had
    assert not tasks.has_more


def test_what_an_engine_is_given_after_it_was_asked_is_not_forgotten() -> None:
    """Its answer may be of the time before; asked again, it says what it has."""
    tasks = router(2, 8, [Work(4, 4.0)] * 2)
    assert tasks.assign() == {0: [0], 1: [1]}
    tasks.ask(0, NOTHING)
    assert tasks.steal() == [(1, 4)]
    tasks.ask(1, Work(1, 1.0))
    tasks.offer(2, Work(3, 3.0))
    tasks.offer(3, Work(6, 6.0))
    assert tasks.assign() == {0: [2], 1: [3]}
    tasks.gave_up(1, 0)
    tasks.ask(0, NOTHING)
    assert tasks.steal() == [(1, 4)]


def test_who_asks_waits_for_the_answer_of_the_only_one_that_may_give_some_up() -> None:
    tasks = router(2, 8, [Work(4, 4.0)] * 2)
    assert tasks.assign() == {0: [0], 1: [1]}
    tasks.ask(0, Work(1, 1.0))
    assert (tasks.assign(), tasks.steal()) == ({}, [(1, 3)])
    assert (tasks.assign(), tasks.has_more) == ({}, True)
    tasks.gave_up(1, 0)
    assert tasks.assign() == {0: []}


def test_one_engine_has_nobody_to_take_from() -> None:
    tasks = router(1, 8, [Work(4, 4.0)])
    assert tasks.assign() == {0: [0]}
    assert not tasks.has_more
