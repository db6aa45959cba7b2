"""A journal's size depends only on unreleased responses, and the file is complete at every moment."""

from __future__ import annotations

import errno
import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.rollout import journal_contents as module
from mcore_rl.rollout.journal import MAX_GROWTH, WORD, JournaledResponse, TokenJournal, read_journal
from mcore_rl.types import Completion, Delta
from tests.unit.rollout.test_journal import Told, ended, request, told

SMALL = 300


def contents(path: Path) -> dict[str, tuple[int, Told]]:
    return {name: (drawn.seed, told(drawn)) for name, drawn in read_journal(path).items()}


@dataclass
class Response:
    seed: int
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str | None = None

    def completion(self, name: str) -> Completion:
        ids, versions = np.array(self.tokens, np.int32), np.array(self.versions, np.int32)
        return Completion(name, ids, np.array(self.logp, np.float32), "abort", versions)

    @property
    def words(self) -> int:
        """Upper bound of a journal's words: a few per response, and every token in its own entry."""
        return 20 + 7 * len(self.tokens)


class Engine:
    """Randomly starts, steps, aborts and releases requests; `responses` is the expected content of its journal."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.chance = path, random.Random(seed)
        self.journal = TokenJournal(path, small_words=SMALL)
        self.responses: dict[str, Response] = {}
        self.version = self.most_words = self.count = 0

    @property
    def running(self) -> list[str]:
        return [name for name, response in self.responses.items() if response.reason is None]

    def act(self) -> None:
        chance = self.chance
        kinds = [self.begin, self.take_over, self.step, self.end, self.abort, self.release, self.change_weights]
        act = chance.choices(kinds, weights=[3, 1, 12, 3, 1, 1, 1])[0]
        act()
        self.most_words = max(self.most_words, sum(response.words for response in self.responses.values()))

    def expected(self) -> dict[str, tuple[int, Told]]:
        return {
            name: (response.seed, (response.tokens, response.logp, response.versions, response.reason))
            for name, response in self.responses.items()
            if response.tokens
        }

    def begin(self) -> None:
        requests, running = [], {*self.running}
        for name in dict.fromkeys(self.new_id() for _ in range(self.chance.randrange(1, 4))):
            if name in running:
                continue
            response = self.responses[name] = Response(self.chance.randrange(2**64))
            if self.chance.random() < 0.3:
                for _ in range(self.chance.randrange(4)):
                    self.draw(response, 1, self.chance.randrange(self.version + 1))
            requests.append(request(name, response.seed, partial=response.completion(name)))
        self.journal.begin(requests)

    def take_over(self) -> None:
        name = self.new_id()
        response = self.responses[name] = Response(self.chance.randrange(2**64), reason="stop")
        self.draw(response, 2, self.version)
        self.journal.take_over([JournaledResponse(response.seed, response.completion(name), "stop")])

    def new_id(self) -> str:
        """Return the id of a new request, of one of a few that recur, or of a later turn."""
        self.count += 1
        first = self.chance.choice([f"train.0.{self.count}", f"val.{self.chance.randrange(5)}.0"])
        known = [name for name in self.responses if name.startswith("train")]
        if known and self.chance.random() < 0.4:
            first = self.chance.choice(known).partition("/")[0]
            return f"{first}/{self.count}"
        return first

    def draw(self, response: Response, count: int, version: int) -> None:
        response.tokens += [self.chance.randrange(2**31) for _ in range(count)]
        response.logp += [-self.chance.randrange(100) / 8 for _ in range(count)]
        response.versions += [version] * count

    def step(self) -> None:
        deltas = []
        for name in self.running:
            count = self.chance.randrange(1, 3)
            response = self.responses[name]
            self.draw(response, count, self.version)
            deltas.append(Delta(name, response.tokens[-count:], response.logp[-count:], self.version))
        self.journal.add(deltas, [])

    def end(self) -> None:
        names = self.some(self.running)
        for name in names:
            self.responses[name].reason = self.chance.choice(["stop", "length"])
        self.journal.add([], [ended(name, str(self.responses[name].reason)) for name in names])

    def abort(self) -> None:
        names = self.some(self.running)
        for name in names:
            del self.responses[name]
        self.journal.discard(names)

    def release(self) -> None:
        names = [*dict.fromkeys(name.partition("/")[0] for name in self.some([*self.responses])), "never begun"]
        for name, response in [*self.responses.items()]:
            if response.reason is not None and name.partition("/")[0] in names:
                del self.responses[name]
        self.journal.release(names)

    def change_weights(self) -> None:
        self.version += 1

    def some(self, names: list[str]) -> list[str]:
        return [name for name in names if self.chance.random() < 0.3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine_0.0"


def num_words(path: Path) -> int:
    return path.stat().st_size // WORD


@pytest.mark.parametrize("seed", range(3))
def test_journal_random_events_keep_it_right_and_short(seed: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 50)
    engine = Engine(path, seed)
    anew, inode = 0, path.stat().st_ino
    for number in range(1200):
        engine.act()
        anew, inode = anew + (path.stat().st_ino != inode), path.stat().st_ino
        assert num_words(path) <= max(SMALL, MAX_GROWTH * engine.most_words)
        if number % 3 == 0:
            assert contents(path) == engine.expected()
    assert anew > 10
    assert engine.journal._count < SMALL, "numbers begin anew as well"


def test_journal_rewrites_are_rare_for_large_files(path: Path) -> None:
    journal, anew, inode = TokenJournal(path, small_words=SMALL), 0, path.stat().st_ino
    for number in range(2000):
        journal.begin([request(f"{number}")])
        journal.add([Delta(f"{number}", [1] * 9, [-1.0] * 9, 3)], [ended(f"{number}", "stop")])
        anew, inode = anew + (path.stat().st_ino != inode), path.stat().st_ino
    assert num_words(path) > MAX_GROWTH**5 * SMALL
    assert anew <= 6


def filled(path: Path) -> Engine:
    """Return the engine of a journal that is rewritten at the next write."""
    engine = Engine(path, 1)
    while num_words(path) < SMALL:
        engine.begin()
        engine.step()
    engine.end()
    engine.journal._limit = 0
    return engine


@pytest.mark.parametrize("where", ["open", "fdopen", "replace"])
def test_journal_failed_rewrite_keeps_the_old_file(where: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = filled(path)

    def fail(*_: object, **__: object) -> None:
        tried.append(where)
        raise OSError(errno.ENOSPC, "No space left on device")

    tried: list[str] = []
    inode = path.stat().st_ino
    with monkeypatch.context() as patched:
        patched.setattr(os, where, fail)
        for _ in range(5):
            engine.step()
    assert tried == [where], "not at every step"
    assert [*path.parent.iterdir()] == [path]
    assert path.stat().st_ino == inode
    assert contents(path) == engine.expected()
    while path.stat().st_ino == inode:
        engine.step()
    assert contents(path) == engine.expected()


def test_journal_concurrent_reader_finds_all_responses(path: Path) -> None:
    journal = TokenJournal(path, small_words=SMALL)
    journal.begin([request("kept"), request("runs")])
    journal.add([Delta("kept", [1, 2], [-1.0, -2.0], 3), Delta("runs", [1], [-1.0], 3)], [ended("kept", "stop")])
    kept = contents(path)["kept"]
    seen: list[tuple[int, Told] | None] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.append(contents(path).get("kept"))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(500):
        journal.begin([request(f"{number}")])
        journal.add([Delta(f"{number}", [1] * 9, [-1.0] * 9, 3)], [ended(f"{number}", "stop")])
        journal.release([f"{number}"])
    over.set()
    thread.join()
    assert seen
    assert all(each == kept for each in seen)
