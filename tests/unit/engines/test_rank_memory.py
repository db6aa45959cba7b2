"""End of an update on an engine rank: its temporary memory goes back to the device before the KV cache wakes up."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from mcore_rl.engines.rank_memory import RankMemory
from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.transports.segments import device_uuid


class Rank(RankMemory):
    """Rank without a model. `calls` are the calls that end an update, in order."""

    def __init__(self, missing: str | None = None) -> None:
        self.calls: list[str] = []

        def receive() -> None:
            self.calls.append("receiver")

        def load() -> None:
            self.calls.append("loader")
            if missing:
                raise WeightSyncError(missing)

        self._receiver = SimpleNamespace(finish=receive)  # type: ignore[assignment]
        self._loader = SimpleNamespace(finish=load, context=nullcontext)  # type: ignore[assignment]


@pytest.mark.parametrize("cuda", [True, False])
def test_finish_update_empties_the_cache_after_loading_on_gpus(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: rank.calls.append("empty_cache"))
    rank.finish_update()
    assert rank.calls == ["receiver", "loader", *(["empty_cache"] if cuda else [])]


def test_finish_update_incomplete_update_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WeightSyncError, match=r"lm_head\.weight"):
        Rank("lm_head.weight").finish_update()


def test_device_memory_of_a_cpu_rank_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Rank().device_memory() is None


def test_device_memory_counts_all_processes_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"uuid-{number}"))
    memory = Rank().device_memory()
    assert memory is not None
    assert (memory.device, memory.used_bytes, memory.total_bytes, memory.reserved_bytes) == ("GPU-uuid-1", 50, 80, 20)
    assert device_uuid() == memory.device
