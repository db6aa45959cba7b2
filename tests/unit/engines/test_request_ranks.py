"""Assignment of requests to the data-parallel ranks of an SGLang engine."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mcore_rl.engines.sglang.request_ranks import RequestRanks
from mcore_rl.engines.sglang.settings import NewRequest
from mcore_rl.weights.slices.engine_layout import EngineLayout

FOUR = EngineLayout(dp=4, expert_parallel=True)


def requests(*prompts: int, first: int = 0) -> list[NewRequest]:
    return [NewRequest(str(first + i), [prompt, 7], {}, "version 0") for i, prompt in enumerate(prompts)]


def ids(by_rank: Sequence[Sequence[NewRequest]]) -> list[list[str]]:
    return [[request.engine_id for request in own] for own in by_rank]


def test_divide_tensor_parallel_ranks_all_get_every_request() -> None:
    ranks = RequestRanks(EngineLayout(3))
    assert ids(ranks.divide(requests(1, 2))) == [["0", "1"]] * 3
    assert ranks.distinct(["first", "second", "third"]) == ["first"]
    assert RequestRanks(FOUR).distinct(["a", "b", "c", "d"]) == ["a", "b", "c", "d"]


def test_divide_groups_stay_on_one_rank_up_to_an_even_share() -> None:
    assert ids(RequestRanks(FOUR).divide(requests(1, 1, 2, 2, 3, 3, 4, 4))) == [
        ["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]
    ]  # fmt: skip
    # One group of eight: two requests on each rank.
    assert ids(RequestRanks(FOUR).divide(requests(*[1] * 8))) == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]


def test_divide_new_requests_go_where_earlier_ones_have_left() -> None:
    ranks = RequestRanks(FOUR)
    ranks.divide(requests(1, 2, 3, 4))
    ranks.remove(["2", "unknown"])
    assert ids(ranks.divide(requests(5, first=4))) == [[], [], ["4"], []]
    ranks.remove(["0", "0"])  # aborted after it finished
    assert ids(ranks.divide(requests(6, 6, first=5))) == [["5", "6"], [], [], []]


def test_divide_no_rank_exceeds_an_even_share() -> None:
    chance = random.Random(3)
    for _ in range(100):
        ranks = RequestRanks(FOUR)
        prompts = sorted(chance.choices(range(9), k=chance.randrange(1, 40)))
        counts = [len(own) for own in ranks.divide(requests(*prompts))]
        assert max(counts) == -(-len(prompts) // 4)
