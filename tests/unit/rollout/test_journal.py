"""Sampled tokens of an engine are read back unchanged, however its process ended."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.journal import JournaledResponse, TokenJournal, read_journal
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.types import Completion, Delta, GenerationRequest, SamplingOptions, TokenSets
from tests.unit.rollout.fake_engine import FakeEngine

SEED = 2**63 + 5
"""A seed that needs 64 bits."""


def request(name: str, seed: int = SEED, length: int = 9, partial: Completion | None = None) -> GenerationRequest:
    return GenerationRequest(name, np.array([3, 4], np.int32), seed, SamplingOptions(length), partial)


def ended(name: str, reason: str) -> Completion:
    nothing = np.zeros(0, np.int32)
    return Completion(name, nothing, nothing.astype(np.float32), reason, nothing)


Told = tuple[list[int], list[float], list[int], str | None]


def told(drawn: JournaledResponse) -> Told:
    response = drawn.completion
    return response.token_ids.tolist(), response.logp.tolist(), response.versions.tolist(), drawn.finish_reason


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journals" / "engine_0.0"


def write_two(path: Path) -> TokenJournal:
    journal = TokenJournal(path)
    journal.begin([request("a"), request("löng name", 7)])
    journal.add([Delta("a", [10, 11], [-0.5, -1.5], 3), Delta("löng name", [20], [-2.0], 3)], [])
    journal.add([Delta("löng name", [21], [-0.125], 4)], [ended("löng name", "length")])
    return journal


def test_journal_responses_round_trip(path: Path) -> None:
    write_two(path)
    found = read_journal(path)
    assert {name: drawn.seed for name, drawn in found.items()} == {"a": SEED, "löng name": 7}
    assert told(found["a"]) == ([10, 11], [-0.5, -1.5], [3, 3], None)
    assert told(found["löng name"]) == ([20, 21], [-2.0, -0.125], [3, 4], "length")
    assert found["a"].completion.token_ids.dtype == found["a"].completion.versions.dtype == np.int32


def at(temperature: float, partial: Completion | None = None, name: str = "a") -> GenerationRequest:
    return replace(request(name, partial=partial), sampling=SamplingOptions(9, temperature=temperature))


def temperatures_in(path: Path, name: str = "a") -> list[float] | None:
    found = read_journal(path)[name].completion.temperatures
    return None if found is None else found.tolist()


def test_journal_tokens_keep_their_temperatures(path: Path, tmp_path: Path) -> None:
    """Across journals, changed temperatures, a rewritten file and copies."""
    paths = [path, *(tmp_path / f"journal{number}" for number in range(2))]
    partial, expected = None, []
    for number, (temperature, journal_path) in enumerate(zip((0.5, 1.25, 0.25), paths, strict=True)):
        journal = TokenJournal(journal_path, small_words=0)
        journal.begin([at(temperature, partial), at(2.0, name="other")])
        tokens = [10 + 2 * number, 11 + 2 * number]
        journal.add([Delta("a", tokens, [-0.5, -1.5], number), Delta("other", [1], [-1.0], number)], [])
        expected += [temperature] * 2
        assert temperatures_in(journal_path) == expected
        assert temperatures_in(journal_path, "other") == [2.0]
        partial = replace(read_journal(journal_path)["a"].completion, finish_reason="abort")
    journal.copy(tmp_path / "copy", ["a"])
    assert temperatures_in(tmp_path / "copy") == expected
    last = TokenJournal(tmp_path / "last")
    last.take_over([replace(read_journal(tmp_path / "copy")["a"], finish_reason="stop")])
    assert temperatures_in(tmp_path / "last") == expected


def test_journal_tokens_keep_their_sets(path: Path, tmp_path: Path) -> None:
    """Across journals, a rewritten file and copies; responses without sets stay without them."""
    runs = [np.array(words, np.int32) for words in ([10, 12], [-1, 0, 5], [12], [-1, -1, -1])]
    partial = None
    for number, journal_path in enumerate((path, tmp_path / "next")):
        journal = TokenJournal(journal_path, small_words=0)
        journal.begin([request("released"), request("other", 1), request("a", partial=partial)])
        for step in range(2):
            token = 2 * number + step
            journal.add(
                [
                    Delta("other", [1], [-1.0], number),
                    Delta("a", [token], [-0.5], number, [runs[token]]),
                    Delta("released", [2], [-1.0], number, [runs[0]]),
                ],
                [],
            )
        journal.discard(["released"])
        journal.copy(tmp_path / "copy", ["a", "other"])
        for found in (read_journal(journal_path), read_journal(tmp_path / "copy")):
            assert found.keys() == {"a", "other"}
            assert found["other"].completion.kept is None
            kept = found["a"].completion.kept
            expected = TokenSets.of(runs[: 2 * number + 2])
            assert kept is not None
            np.testing.assert_array_equal(kept.words, expected.words)
            np.testing.assert_array_equal(kept.offsets, expected.offsets)
        partial = found["a"].completion


def test_read_journal_earlier_version_has_no_temperatures(path: Path) -> None:
    """BEGIN and a STEP of two tokens, as written by versions without temperatures."""
    name = np.frombuffer(b"a\0\0\0", np.int32)
    begin = np.concatenate([np.array([1, 0, 1, 7, 0], np.int32), name])
    step = np.array([2, 3, 2, 0, 0, 10, 11, *np.float32([-0.5, -1.5]).view(np.int32)], np.int32)
    path.parent.mkdir()
    path.write_bytes(b"".join(np.concatenate([[len(e)], e]).astype(np.int32).tobytes() for e in (begin, step)))
    assert told(read_journal(path)["a"]) == ([10, 11], [-0.5, -1.5], [3, 3], None)
    assert temperatures_in(path) is None


def test_read_journal_ignores_a_truncated_write(path: Path) -> None:
    journal = write_two(path)
    before = path.stat().st_size
    journal.add([Delta("a", [12], [-3.0], 4)], [ended("a", "stop")])
    whole = path.read_bytes()
    for size in range(before, len(whole)):
        path.write_bytes(whole[:size])
        assert told(read_journal(path)["a"]) == ([10, 11], [-0.5, -1.5], [3, 3], None)
    path.write_bytes(whole)
    assert told(read_journal(path)["a"])[3] == "stop"


def test_read_journal_missing_file_is_empty(path: Path) -> None:
    assert read_journal(path) == {}
    TokenJournal(path).begin([request("a")])
    assert read_journal(path) == {}


def last_step(journal: TokenJournal, name: str) -> None:
    journal.add([Delta(name, [5], [-1.0], 3)], [ended(name, "stop")])


def test_loop_dead_engine_keeps_its_journal(path: Path) -> None:
    engine = FakeEngine()
    loop = EngineLoop(engine, TokenJournal(path))

    def die() -> None:
        if engine.num_passes == 2:
            raise WorkerDiedError("rank 1 is gone")

    engine.before_pass = die
    heard: list[Completion | BaseException] = []

    def listen(end: Completion | BaseException) -> None:
        heard.append(end)
        loop.abort_nowait(["a"])  # as a cancelled episode does

    loop.submit_nowait([request("a", 7)], listen)
    with pytest.raises(WorkerDiedError, match="rank 1"):
        loop.serve()
    assert len(heard) == 1
    assert told(read_journal(path)["a"])[0] == [7, 8]


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the disk except for 10 bytes."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:10]))


def test_journal_full_disk_does_not_end_the_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = write_two(path)
    fill_disk(monkeypatch)
    journal.add([Delta("a", [12], [-3.0], 4)], [])
    monkeypatch.undo()
    journal.add([Delta("a", [13], [-3.0], 4)], [ended("a", "stop")])  # there is a gap before it
    assert told(read_journal(path)["a"]) == ([10, 11], [-0.5, -1.5], [3, 3], None)
    journal.begin([request("b")])
    last_step(journal, "b")
    journal.release(["löng name", "b"])
    assert set(read_journal(path)) == {"a"}


def test_journal_failed_release_empties_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = write_two(path)
    fill_disk(monkeypatch)
    journal.begin([request("löng name", 7)])
    assert read_journal(path) == {}
    monkeypatch.undo()
    last_step(journal, "a")
    journal.release(["a"])
    assert read_journal(path) == {}


def test_loop_writes_tokens_to_the_journal_each_step(path: Path) -> None:
    loop = EngineLoop(FakeEngine(), TokenJournal(path))
    completions: list[Completion] = []

    def look() -> None:
        """Compare the journal with the running requests between two passes."""
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
    loop.release(["r0"])
    left = loop.between_steps(lambda: {*read_journal(path)})
    loop.stop()
    thread.join(20)
    assert (max(seen), left) == (3, {"r1", "r2"})
    for completion in completions:
        assert told(found[completion.request_id])[0] == completion.token_ids.tolist()
        assert found[completion.request_id].finish_reason == completion.finish_reason
