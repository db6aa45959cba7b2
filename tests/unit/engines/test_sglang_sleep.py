"""Sleep of SGLang's engine, with ranks that only record their calls."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.settings import EngineSettings
from mcore_rl.engines.sglang import engine as sglang
from mcore_rl.engines.sglang.engine import SglangEngine
from mcore_rl.engines.sglang.settings import GpuMemory, RankSettings
from mcore_rl.errors import ConfigError, WeightSyncError


class FakeRanks:
    """RankProcesses of two ranks that are idle one step after the first call. `memory`: of their GPUs."""

    vocab_size = 96
    memory = (GpuMemory(50 << 30, 80 << 30), GpuMemory(40 << 30, 80 << 30))

    def __init__(self, settings: RankSettings, *_: object, memory_arguments: Any) -> None:
        self.settings = settings
        self.calls: list[tuple[object, ...]] = []
        self.busy = 1
        self.arguments = memory_arguments(self.memory)

    def call(self, method: str, *arguments: object) -> list[Any]:
        self.calls.append((method, *arguments))
        if method == "steps":
            self.busy -= 1
        if method in ("steps", "drain"):
            return [[], []]
        return [not self.busy if method in ("is_idle", "reset_prefix_cache") else 5] * 2


def start(monkeypatch: pytest.MonkeyPatch, device: str, **rollout: Any) -> tuple[SglangEngine, FakeRanks]:
    monkeypatch.setattr(sglang, "RankProcesses", FakeRanks)
    monkeypatch.setattr(sglang, "_device", lambda: device)
    monkeypatch.setattr(sglang, "server_arguments", lambda settings, device: {"device": device})
    config = RolloutConfig(engine="sglang", tp=2, **rollout)
    engine = SglangEngine(EngineSettings("/model", config, dtype="bfloat16", seed=1, timeout_seconds=1.0))
    ranks = engine._ranks
    assert isinstance(ranks, FakeRanks)
    return engine, ranks


def test_start_gives_all_ranks_the_fraction_of_the_smallest_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ranks = start(monkeypatch, "cuda", gpu_memory_fraction=0.6)
    assert ranks.arguments == {"mem_fraction_static": pytest.approx(1 - 32 / 40)}
    with pytest.raises(ConfigError, match=r"^rollout.gpu_memory_fraction=0.4 leaves 48.0 GiB"):
        start(monkeypatch, "cuda", gpu_memory_fraction=0.4)


def test_start_without_room_for_the_cache_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConfigError("SGLang cannot run this: ValueError: raise --mem-fraction-static above 0.4")

    monkeypatch.setattr(FakeRanks, "__init__", fail)
    with pytest.raises(ConfigError, match=r"^rollout\.gpu_memory_fraction \(0\.6\) is too small: SGLang cannot run"):
        start(monkeypatch, "cuda")


def test_sleep_steps_until_idle_and_releases_parts_that_are_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ranks = start(monkeypatch, "cuda")
    assert engine.sleep(keep_weights=False) == 10
    assert ranks.calls == [
        ("is_idle",),
        ("steps", 1),
        ("is_idle",),
        ("reset_prefix_cache", False),
        ("release", ["kv_cache", "weights"], False),
    ]
    ranks.calls.clear()
    engine.wake_up("weights")
    engine.sleep(keep_weights=True)
    assert ranks.calls == [
        ("restore", "weights"),
        ("is_idle",),
        ("reset_prefix_cache", False),
        ("release", ["weights"], True),
    ]


def test_wake_up_after_discarding_weights_requires_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ranks = start(monkeypatch, "cuda")
    engine.sleep(keep_weights=False)
    engine.wake_up("weights")
    with pytest.raises(WeightSyncError, match="discarded its weights during sleep"):
        engine.wake_up("kv_cache")
    assert ("restore", "kv_cache") not in ranks.calls
    engine.begin_update()
    engine.finish_update(3)
    engine.wake_up("kv_cache")
    assert ranks.calls[-1] == ("restore", "kv_cache")


@pytest.mark.parametrize(("device", "keep_weights"), [("cuda", True), ("cpu", True), ("cpu", False)])
def test_wake_up_with_kept_weights_needs_no_update(
    monkeypatch: pytest.MonkeyPatch, device: str, keep_weights: bool
) -> None:
    """A CPU never discards weights."""
    engine, ranks = start(monkeypatch, device)
    engine.sleep(keep_weights=keep_weights)
    for part in ("weights", "kv_cache"):
        engine.wake_up(part)
    assert ranks.calls[-2:] == [("restore", "weights"), ("restore", "kv_cache")]
