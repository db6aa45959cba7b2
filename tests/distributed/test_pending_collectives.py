"""A rank that waits for its peers says in which collective of which group; one that waits for none says nothing."""

from __future__ import annotations

import time
from typing import Any

from tests.distributed.launch import launch


def _nothing_is_pending() -> None:
    """The recorder hears of an end a moment after the caller."""
    from mcore_rl.runtime.collectives import pending_collectives

    deadline = time.monotonic() + 10
    while pending_collectives():
        assert time.monotonic() < deadline, pending_collectives()
        time.sleep(0.05)


def _wait_for_the_other(rank: int) -> list[tuple[str, str, int]]:
    import torch
    import torch.distributed as dist

    from mcore_rl.runtime.collectives import pending_collectives

    group, tensor = dist.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP"), torch.ones(2)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    _nothing_is_pending()
    if rank == 1:
        time.sleep(2)
        dist.all_reduce(tensor, group=group)
        return []
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    time.sleep(0.5)
    pending = pending_collectives()
    work.wait()
    _nothing_is_pending()
    assert all(0.4 < each.seconds < 60 for each in pending)
    return [(each.group, each.name, each.number) for each in pending]


def test_a_rank_says_what_it_waits_in() -> None:
    waiting, _ = launch(_wait_for_the_other, 2)
    assert waiting == [("TENSOR_MODEL_PARALLEL_GROUP", "all_reduce", 2)]
