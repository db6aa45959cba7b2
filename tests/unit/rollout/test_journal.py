"""What an engine has drawn is read back as it was, however its process ended."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.rollout.journal import Drawn, Journal, read_journal
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.types import Completion, Delta, GenerationRequest, SamplingOptions
from tests.unit.rollout.fake_engine import FakeEngine

SEED = 2**63 + 5
"""Of 64 bits."""


def request(name: str, seed: int = SEED, length: int = 9) -> GenerationRequest:
    return GenerationRequest(name, np.array([3, 4], np.int32), seed, SamplingOptions(length))


def ended(name: str, reason: str) -> Completion:
    nothing = np.zeros(0, np.int32)
    return Completion(name, nothing, nothing.astype(np.float32), reason, nothing)


def told(drawn: Drawn) -> tuple[list[int], list[float], list[int], str | None]:
    response = drawn.completion
    return response.token_ids.tolist(), response.logp.tolist(), response.versions.tolist(), drawn.finish_reason


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journals" / "engine_0.0"


def write_two(path: Path) -> Journal:
    journal = Journal(path)
    journal.begin([request("a"), request("löng name", 7)])
    journal.add([Delta("a", [10, 11], [-0.5, -1.5], 3), Delta("löng name", [20], [-2.0], 3)], [])
    journal.add([Delta("löng name", [21], [-0.125], 4)], [ended("löng name", "length")])
    return journal


def test_responses_come_back_with_seed_version_and_reason(path: Path) -> None:
    write_two(path)
    found = read_journal(path)
    assert {name: drawn.seed for name, drawn in found.items()} == {"a": SEED, "löng name": 7}
    assert told(found["a"]) == ([10, 11], [-0.5, -1.5], [3, 3], None)
    assert told(found["löng name"]) == ([20, 21], [-2.0, -0.125], [3, 4], "length")
    assert found["a"].completion.token_ids.dtype == found["a"].completion.versions.dtype == np.int32


def test_a_response_that_had_begun_elsewhere_is_whole(path: Path, tmp_path: Path) -> None:
    write_two(path)
    partial = replace(read_journal(path)["löng name"].completion, finish_reason="abort")
    second = Journal(tmp_path / "second")
    second.begin([replace(request("löng name", 7), partial=partial)])
    second.add([Delta("löng name", [22], [-4.0], 4)], [])
    assert told(read_journal(tmp_path / "second")["löng name"]) == (
        [20, 21, 22], [-2.0, -0.125, -4.0], [3, 4, 4], None,
    )  # fmt: skip


def test_wherever_the_last_write_was_cut_what_was_whole_before_is_read(path: Path) -> None:
    journal = write_two(path)
    before = path.stat().st_size
    journal.add([Delta("a", [12], [-3.0], 4)], [ended("a", "stop")])
    whole = path.read_bytes()
    for size in range(before, len(whole)):
        path.write_bytes(whole[:size])
        assert told(read_journal(path)["a"]) == ([10, 11], [-0.5, -1.5], [3, 3], None)
    path.write_bytes(whole)
    assert told(read_journal(path)["a"])[3] == "stop"


def test_without_a_journal_nothing_was_drawn(path: Path) -> None:
    assert read_journal(path) == {}
    Journal(path).begin([request("a")])
    assert read_journal(path) == {}


def test_it_begins_anew_when_nothing_ran(path: Path) -> None:
    journal = write_two(path)
    journal.begin([request("b")])
    assert set(read_journal(path)) == {"a", "löng name"}
    journal.forget(["a", "b"])
    journal.begin([request("c")])
    journal.add([Delta("c", [5], [-1.0], 9)], [])
    assert set(read_journal(path)) == {"c"}


def test_what_ended_under_earlier_weights_is_nobodys_and_what_runs_goes_on(path: Path) -> None:
    """Validation asks for equal ids and seeds under every weights."""
    journal = write_two(path)
    loop = EngineLoop(FakeEngine(), journal)
    loop.weights_changed()
    assert set(read_journal(path)) == {"a", "löng name"}
    journal.add([], [ended("a", "stop")])
    loop.weights_changed()
    assert read_journal(path) == {}


def test_a_full_disk_costs_what_could_be_taken_over_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = write_two(path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:10]))
    journal.add([Delta("a", [12], [-3.0], 4)], [])
    monkeypatch.undo()
    journal.add([Delta("a", [13], [-3.0], 4)], [ended("a", "stop")])  # there is a gap before it
    assert told(read_journal(path)["a"]) == ([10, 11], [-0.5, -1.5], [3, 3], None)


def test_the_loop_writes_what_its_engine_draws_as_it_draws_it(path: Path) -> None:
    loop = EngineLoop(FakeEngine(), Journal(path))
    completions: list[Completion] = []

    def look() -> None:
        """Between two passes."""
        running = loop.engine._running.values()  # type: ignore[attr-defined]
        found = read_journal(path)
        for entry in running:
            if entry.token_ids:
                assert told(found[entry.request.request_id])[:3] == (
                    entry.token_ids,
                    np.array(entry.logp, np.float32).tolist(),
                    entry.versions,
                )
        seen.append(len(running))

    seen: list[int] = []
    loop.engine.before_pass = look  # type: ignore[attr-defined]
    thread = threading.Thread(target=loop.serve, daemon=True)
    thread.start()
    loop.generate([request(f"r{i}", i, length) for i, length in enumerate((4, 2, 7))], completions.append)
    found = read_journal(path)
    loop.stop()
    thread.join(20)
    assert max(seen) == 3
    for completion in completions:
        assert told(found[completion.request_id])[0] == completion.token_ids.tolist()
        assert found[completion.request_id].finish_reason == completion.finish_reason
