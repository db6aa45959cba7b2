"""Measurements of the fleet if an engine is lost meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from mcore_rl.errors import WorkerDiedError
from mcore_rl.runtime.engines.fleet import Fleet
from tests.unit.runtime.engines import Engine, Process, Watch


class _Process(Process):
    def call(self, method: Callable[..., object], *arguments: object, **options: object) -> Any:
        return None


class _Watch(Watch):
    """Watch whose waits end with the death of `dies`, or of an unknown process."""

    dies: Engine | None = None

    def get(self, refs: Sequence[object]) -> list[object]:
        if self.dies is not None:
            self.dead[id(self.dies.process)] = "engine 0 died"
        raise WorkerDiedError("a process died")


@pytest.mark.parametrize("is_engine", [True, False])
def test_device_memory_of_lost_engine_restarts_nothing(monkeypatch: pytest.MonkeyPatch, is_engine: bool) -> None:
    watch = _Watch()
    watch.engines = [Engine(0), Engine(1)]
    for engine in watch.engines:
        engine.process = _Process(engine.name)
        engine.all.append(engine.process)
    fleet = Fleet([*watch.engines], cast(Any, watch), 3, note=lambda line: None)
    if is_engine:
        watch.dies = watch.engines[0]
        assert fleet.device_memory() == []
        assert fleet.failed() == [watch.engines[0]]
    else:
        with pytest.raises(WorkerDiedError):
            fleet.device_memory()
    assert fleet.num_restarts == 0
