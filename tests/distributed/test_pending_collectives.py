"""A rank that waits for its peers reports the collective and group; a rank that does not wait reports nothing."""

from __future__ import annotations

import re
import time
from typing import Any

from tests.distributed.launch import launch


def _nothing_is_pending() -> None:
    """Wait until nothing is pending: the recorder registers the end of a collective slightly after the caller."""
    from mcore_rl.runtime.collectives import pending_collectives

    deadline = time.monotonic() + 60
    while pending_collectives():
        assert time.monotonic() < deadline, pending_collectives()
        time.sleep(0.05)


def _wait_for_the_other(rank: int) -> list[str]:
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
    return pending


def test_pending_collectives_names_collective_and_group() -> None:
    (waiting,), _ = launch(_wait_for_the_other, 2)
    assert re.fullmatch(r"all_reduce 2 of TENSOR_MODEL_PARALLEL_GROUP for \d\d? s", waiting)
