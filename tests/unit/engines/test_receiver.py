"""Calls that are allowed between the begin and the end of an update."""

from __future__ import annotations

import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.rank_engine import RankEngine
from mcore_rl.engines.settings import EngineSettings
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
        if method == "release_kv_cache":
            return [1, 1]
        return [[], []]


class Engine(RankEngine):
    _add = _run_step = _cancel = _routing_of = _sets_of = shutdown = None  # type: ignore[assignment]

    def __init__(self, ranks: Ranks, *, load_weights: bool = True) -> None:
        rollout, settings = RolloutConfig(), {"dtype": "float32", "seed": 1, "timeout_seconds": 1}
        super().__init__(EngineSettings("model", rollout, load_weights=load_weights, **settings))  # type: ignore[arg-type]
        self._ranks = ranks

    def _empty_prefix_cache(self, recompute: bool) -> bool:
        return bool(self._ranks.call(f"reset_prefix_cache {recompute}"))


@pytest.mark.parametrize("fails", ["begin_update", "receive_bucket", "finish_update", "reset_prefix_cache False"])
def test_receiver_partial_update_blocks_use_until_complete_update(fails: str) -> None:
    ranks = Ranks()
    engine = Engine(ranks)
    engine._require_complete()
    ranks.fails = fails
    with pytest.raises(WeightSyncError, match=fails):
        update(engine, 1)
    for use in (engine._require_complete, engine.compare):
        with pytest.raises(WeightSyncError, match="the update after version 0"):
            use()
    assert engine.weight_version == 0
    ranks.fails = None
    update(engine, 2)
    engine._require_complete()
    assert engine.weight_version == 2


def test_engine_with_random_weights_generates_nothing_before_an_update() -> None:
    engine = Engine(Ranks(), load_weights=False)
    assert not engine.can_generate
    with pytest.raises(WeightSyncError, match="complete update"):
        engine._require_complete()
    update(engine, 1)
    assert engine.can_generate
    engine.sleep(keep_weights=True)
    engine.wake_up("weights")
    assert not engine.can_generate
    engine.wake_up("kv_cache")
    assert engine.can_generate


def update(engine: RankEngine, version: int) -> None:
    engine.begin_update()
    assert engine.receive_bucket(0) == [64, 32]
    engine.finish_update(version)


def test_finish_update_resets_prefix_cache_after_loading() -> None:
    ranks = Ranks()
    engine = Engine(ranks)
    update(engine, 1)
    assert ranks.calls == ["begin_update", "receive_bucket", "finish_update", "reset_prefix_cache False"]
    engine.begin_update()
    engine.finish_update(2, recompute=True)
    assert ranks.calls[-1] == "reset_prefix_cache True"


def test_update_without_frozen_weights_needs_a_complete_whole_one() -> None:
    ranks = Ranks()
    engine = Engine(ranks)
    message = "begins at round 3, but the engine lacks the frozen weights"
    with pytest.raises(WeightSyncError, match=message):
        engine.begin_update(3)
    engine._require_complete()  # the refused update changed nothing
    engine.begin_update()
    with pytest.raises(WeightSyncError, match=message):
        engine.begin_update(3)
    update(engine, 1)
    engine.begin_update(3)
    engine.finish_update(2)
    engine.sleep(keep_weights=True)
    for part in ("weights", "kv_cache"):
        engine.wake_up(part)
    engine.begin_update(3)
    engine.finish_update(3)
    engine.sleep(keep_weights=False)
    engine.wake_up("weights")
    with pytest.raises(WeightSyncError, match=message):
        engine.begin_update(3)
    update(engine, 4)
    engine.begin_update(3)
    engine.begin_update()  # discards the unfinished update
    with pytest.raises(WeightSyncError, match=message):
        engine.begin_update(3)
