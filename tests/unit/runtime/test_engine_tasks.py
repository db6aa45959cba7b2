"""Tasks of an engine in checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_rl.rollout.journal import JournaledResponse, TokenJournal, read_journal
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.runtime.engines.process import EngineProcess
from mcore_rl.runtime.spans import SpanRecorder
from mcore_rl.runtime.trajectory_store import TrajectoryStore
from tests.unit.rollout.fake_engine import FakeEngine
from tests.unit.rollout.streaming.test_checkpoint import buffers
from tests.unit.rollout.test_loop import requests_of


@contextmanager
def engine(journal: Path) -> Iterator[EngineProcess]:
    """Run an engine process in this process."""
    process = EngineProcess.__new__(EngineProcess)
    process.spans, process._kept = SpanRecorder("engine"), TrajectoryStore("engine")
    process.loop = EngineLoop(FakeEngine(), TokenJournal(journal))
    thread = threading.Thread(target=process.loop.serve, daemon=True)
    thread.start()
    yield process
    process.loop.stop()
    thread.join()


def sampled(journal: Path) -> dict[str, Any]:
    def plain(response: JournaledResponse) -> tuple[object, ...]:
        done = response.completion
        return response.seed, response.finish_reason, done.token_ids.tolist(), done.versions.tolist()

    return {name: plain(response) for name, response in read_journal(journal).items()}


def test_restored_responses_are_in_the_journal_until_they_are_released(tmp_path: Path) -> None:
    """Earlier weights have sampled them: if the engine is lost, only its journal has them."""
    path, before, after = tmp_path / "engine_0", tmp_path / "before", tmp_path / "after"
    with engine(before) as saving:
        fake = saving.loop.engine
        for version, name in enumerate(["trained", "first", "second"]):
            saving.loop.between_steps(lambda version=version: setattr(fake, "weight_version", version))
            saving.loop.generate(requests_of(name, [3, 5]), lambda done: None)
        keys = [saving._kept.keep(buffers([3, 5], False), [f"{name}.0", f"{name}.1"]) for name in ("first", "second")]
        saving.save_tasks(str(path), keys, [])
    expected = {name: response for name, response in sampled(before).items() if not name.startswith("trained")}
    assert {versions[0] for *_, versions in expected.values()} == {1, 2}
    with engine(after) as restoring:
        names = [["first.0", "first.1"], ["second.0", "second.1"]]
        first, _ = restoring.restore_tasks(f"{path}.npz", names)
        assert sampled(after) == expected
        restoring.loop.release(restoring._kept.release([first]))
        restoring.loop.between_steps(lambda: None)
        assert {name.partition(".")[0] for name in sampled(after)} == {"second"}


def test_tasks_of_an_engine_without_a_journal_are_restored(tmp_path: Path) -> None:
    with engine(tmp_path / "before") as saving:
        saving.loop._journal = None
        files = saving.save_tasks(str(tmp_path / "engine_0"), [saving._kept.keep(buffers([3], False), ["a"])], [])
        assert [file.name for file in files] == ["engine_0.npz"]
        assert saving.restore_tasks(str(tmp_path / "engine_0.npz"), [["a"]]) == [1]
