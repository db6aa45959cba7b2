"""Calls that are allowed between the begin and the end of an update."""

from __future__ import annotations

import pytest

from mcore_rl.engines.rank_engine import RanksReceiver
from mcore_rl.errors import WeightSyncError


class Ranks:
    """Two ranks. `fails`: name of a method that raises. `loaded`: bytes of a bucket that each rank acknowledges."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: str | None = None
        self.loaded = [64, 32]

    def call(self, method: str, *args: object) -> list[object]:
        self.calls.append(method)
        if method == self.fails:
            raise WeightSyncError(method)
        if method == "receive_bucket":
            return self.loaded
        return [[], []]

    def reset_prefix_cache(self, recompute: bool) -> None:
        self.call(f"reset_prefix_cache {recompute}")


def receiver_of(ranks: Ranks) -> RanksReceiver:
    return RanksReceiver(ranks, ranks.reset_prefix_cache)


@pytest.mark.parametrize("fails", ["begin_update", "receive_bucket", "finish_update", "reset_prefix_cache False"])
def test_receiver_partial_update_blocks_use_until_complete_update(fails: str) -> None:
    ranks = Ranks()
    receiver = receiver_of(ranks)
    receiver.require_complete()
    ranks.fails = fails
    with pytest.raises(WeightSyncError, match=fails):
        update(receiver, 1)
    for use in (receiver.require_complete, receiver.compare):
        with pytest.raises(WeightSyncError, match="the update after version 0"):
            use()
    assert receiver.version == 0
    ranks.fails = None
    update(receiver, 2)
    receiver.require_complete()
    assert receiver.version == 2


def update(receiver: RanksReceiver, version: int) -> None:
    receiver.begin_update()
    assert receiver.receive_bucket(0) == [64, 32]
    receiver.finish_update(version)


def test_finish_update_resets_prefix_cache_after_loading() -> None:
    ranks = Ranks()
    receiver = receiver_of(ranks)
    update(receiver, 1)
    assert ranks.calls == ["begin_update", "receive_bucket", "finish_update", "reset_prefix_cache False"]
    receiver.begin_update()
    receiver.finish_update(2, recompute=True)
    assert ranks.calls[-1] == "reset_prefix_cache True"
