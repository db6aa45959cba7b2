"""What an engine has drawn, in a file that outlives its process: whoever takes over its requests goes on from there.

Words of 4 bytes. Whatever is written at once begins with the number of words that follow: entries of three words, and
what belongs to them.

    BEGIN    number of a request, bytes of its id    its seed (2 words), its id, padded
    STEP     version, count                          numbers, tokens, log-probabilities: one of each per token
    END      number, index of its reason
    RELEASE  number, 0                               nobody is to take it over
    TEMPERATURE  number, place of a token            float32: sampling temperature from that token of the response on

Files of earlier versions have no TEMPERATURE. Their tokens count as sampled at the temperature of the request that
continues them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mcore_rl.types import Completion, Delta, GenerationRequest

BEGIN, STEP, END, RELEASE, TEMPERATURE = 1, 2, 3, 4, 5
REASONS = ("stop", "length")
HEAD = 3
WORD = 4
SMALL = 2 * 2**20
"""Words of a file that nobody minds."""
GARBAGE = 3
"""Times what it held when it was last written anew a file may hold before that is done again: so that costs, in all, no
more than some times what was drawn."""
BLOCK = 2**20
"""Tokens that are copied at a time."""
ANEW = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND


class Journal:
    """Written at `path`, anew. Each call is one write, which survives the process whole or in part: `read_journal`
    leaves out what is not whole. Responses stay, once they have ended, until they are released. The file is written
    anew without what was released when it has more than `small` words and has grown GARBAGE times.

    A disk that is full costs what could be taken over, never the run.
    """

    def __init__(self, path: Path, *, small: int = SMALL) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._small = path, small
        self._file: int | None = os.open(path, ANEW, 0o600)
        self._size, self._limit = 0, small
        """Words."""
        self._is_whole = True
        """Whether all that was drawn is there. Where it is not, only releases are written."""
        self._running: dict[str, int] = {}
        """Numbers by id."""
        self._ended: dict[str, dict[str, int]] = {}
        """Numbers by id, by the id of the episode's first request."""
        self._count = 0

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """They run from now on; what they came with counts as drawn. Whatever had their ids before is released."""
        self.forget([request.request_id for request in requests])
        words = array("i")
        for request in requests:
            number = self._running[request.request_id] = self._append_begin(words, request.request_id, request.seed)
            place = 0
            if request.partial is not None:
                _append_response(words, number, request.partial)
                _append_temperature_runs(words, number, request.partial.temperatures)
                place = len(request.partial.token_ids) if request.partial.temperatures is not None else 0
            _append_temperature(words, number, place, request.sampling.temperature)
        self._write(words)

    def take_over(self, responses: Sequence[Drawn]) -> None:
        """Those that had ended on lost engines: they count as drawn here. Whatever had their ids before is released."""
        self.forget([drawn.completion.request_id for drawn in responses])
        words = array("i")
        for drawn in responses:
            name, reason = drawn.completion.request_id, drawn.finish_reason
            assert reason is not None, f"{name} has not ended"
            number = self._append_begin(words, name, drawn.seed)
            _append_response(words, number, drawn.completion)
            _append_temperature_runs(words, number, drawn.completion.temperatures)
            self._append_end(words, name, number, reason)
        self._write(words)

    def add(self, deltas: Sequence[Delta], completions: Iterable[Completion]) -> None:
        """What a step has done."""
        words = array("i")
        if deltas:
            numbers = [self._running[delta.request_id] for delta in deltas for _ in delta.token_ids]
            words.extend((STEP, deltas[0].version, len(numbers)))
            words.extend(numbers)
            words.extend([token for delta in deltas for token in delta.token_ids])
            words.frombytes(array("f", [logp for delta in deltas for logp in delta.logp]).tobytes())
        for completion in completions:
            name = completion.request_id
            self._append_end(words, name, self._running.pop(name), completion.finish_reason)
        self._write(words)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that were aborted, or begin again; their responses are released."""
        numbers = []
        for name in request_ids:
            number = self._running.pop(name, None)
            if number is None and (ended := self._ended.get(first_id(name))) is not None:
                number = ended.pop(name, None)
                if not ended:
                    del self._ended[first_id(name)]
            if number is not None:
                numbers.append(number)
        self._write_releases(numbers)

    def release(self, request_ids: Iterable[str]) -> None:
        """Responses that have ended, with later turns of the episodes that these requests began: nobody is to take them
        over any more."""
        ended = [self._ended.pop(name) for name in request_ids if name in self._ended]
        self._write_releases([number for of_episode in ended for number in of_episode.values()])

    def copy(self, path: Path, request_ids: Iterable[str]) -> None:
        """Writes what was drawn for these requests, and for later turns of the episodes that they began, to another
        file, durably.

        Raises: OSError.
        """
        wanted = set(request_ids)
        live = [number for name, number in self._running.items() if first_id(name) in wanted]
        live += [number for name in wanted for number in self._ended.get(name, {}).values()]
        numbers = np.full(self._count, -1, np.int32)
        numbers[live] = np.arange(len(live))
        frames = _anew(_Contents.of(self._path), numbers) if live else iter(())
        with path.open("wb") as file:
            for frame in frames:
                file.write(frame.data)
            file.flush()
            os.fsync(file.fileno())

    def _append_begin(self, words: array[int], name: str, seed: int) -> int:
        """Its number."""
        number, encoded = self._count, name.encode()
        self._count += 1
        words.extend((BEGIN, number, len(encoded)))
        words.frombytes(int(seed).to_bytes(8, "little") + encoded + bytes(-len(encoded) % WORD))
        return number

    def _append_end(self, words: array[int], name: str, number: int, reason: str) -> None:
        words.extend((END, number, REASONS.index(reason)))
        self._ended.setdefault(first_id(name), {})[name] = number

    def _write(self, words: array[int]) -> None:
        self._is_whole = self._is_whole and self._has_written(words)

    def _write_releases(self, numbers: Sequence[int]) -> None:
        words = array("i", [word for number in numbers for word in (RELEASE, number, 0)])
        if self._file is not None and not self._has_written(words):
            # Better nothing than what another request of the same id must not be given.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file, self._is_whole = None, False

    def _has_written(self, words: array[int]) -> bool:
        """All of them, or none."""
        if not words:
            return True
        assert self._file is not None
        words.insert(0, len(words))
        with contextlib.suppress(OSError):
            if os.write(self._file, words.tobytes()) == len(words) * WORD:
                self._size += len(words)
                if self._size > self._limit:
                    self._compact(self._file)
                return True
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._size * WORD)  # nobody could read on behind a gap
        return False

    def _compact(self, file: int) -> None:
        """Writes it anew, with what was not released and under new numbers."""
        live = [self._running, *self._ended.values()]
        numbers = np.full(self._count, -1, np.int32)
        old = np.array([number for of_live in live for number in of_live.values()], np.int64)
        numbers[old] = np.arange(len(old))
        try:
            self._file, self._size = _replace(self._path, _anew(_Contents.of(self._path), numbers))
        except OSError:
            self._limit = 2 * self._size  # another time
            return
        os.close(file)
        self._limit = max(self._small, GARBAGE * self._size)
        self._count = len(old)
        for of_live in live:
            of_live.update({name: int(numbers[number]) for name, number in of_live.items()})


@dataclass
class Drawn:
    """A response, or its beginning, and the seed of its request. `finish_reason`: None where it had not ended."""

    seed: int
    completion: Completion
    finish_reason: str | None


def first_id(request_id: str) -> str:
    """Of the request that began the episode, whose later turns have ids of their own."""
    return request_id.partition("/")[0]


def read_journal(path: Path) -> dict[str, Drawn]:
    """Responses by the id of the request, also those that have ended, but for those that were released; {} where there
    is no journal."""
    try:
        contents = _Contents.of(path)
    except OSError:
        return {}
    numbers, released = contents.numbers(BEGIN), contents.numbers(RELEASE)
    kept = np.full(1 + max(numbers.max(initial=-1), released.max(initial=-1)), -1, np.int32)
    kept[numbers] = numbers
    kept[released] = -1
    names = dict(zip(numbers.tolist(), contents.names(), strict=True))
    reasons = dict(zip(contents.numbers(END).tolist(), contents.seconds(END).tolist(), strict=True))
    runs: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for number, place, bits in contents.temperatures().tolist():
        runs[number].append((place, float(np.int32(bits).view(np.float32))))
    drawn = np.concatenate(list(contents.tokens(kept)), axis=1)
    drawn = drawn[:, np.argsort(drawn[0], kind="stable")]
    starts = np.flatnonzero(np.diff(drawn[0], prepend=-1))
    responses = {}
    for number, response in zip(drawn[0, starts].tolist(), np.split(drawn, starts[1:], axis=1), strict=False):
        _, tokens, logp, versions = response.copy()
        (name, seed), reason = names[number], REASONS[reasons[number]] if number in reasons else None
        temperatures = _temperatures(runs.get(number, ()), len(tokens))
        completion = Completion(
            name, tokens, logp.view(np.float32), reason or "abort", versions, temperatures=temperatures
        )
        responses[name] = Drawn(seed, completion, reason)
    return responses


@dataclass(frozen=True)
class _Contents:
    """What was written whole: words, and where entries begin, by kind. Shapes: words int32 [W], places int64 [E]."""

    words: np.ndarray
    places: dict[int, np.ndarray]

    @classmethod
    def of(cls, path: Path) -> _Contents:
        """Raises: OSError."""
        words = np.fromfile(path, dtype=np.int32)
        places = {kind: array("q") for kind in (BEGIN, STEP, END, RELEASE, TEMPERATURE)}
        view, at = words.data, 0  # whose items are found faster than the array's
        while at < len(view) and at + 1 + view[at] <= len(view):
            at, end = at + 1, at + 1 + view[at]
            while at < end:
                kind = view[at]
                places[kind].append(at)
                at += HEAD
                if kind == STEP:
                    at += 3 * view[at - 1]
                elif kind == BEGIN:
                    at += 2 - (-view[at - 1] // WORD)
                elif kind == TEMPERATURE:
                    at += 1
        return cls(words, {kind: np.frombuffer(of_kind, np.int64) for kind, of_kind in places.items()})

    def numbers(self, kind: int) -> np.ndarray:
        """Of requests, from entries that have one. Shapes: int32 [E]."""
        return self.words[self.places[kind] + 1]

    def seconds(self, kind: int) -> np.ndarray:
        """What follows these. Shapes: int32 [E]."""
        return self.words[self.places[kind] + 2]

    def temperatures(self) -> np.ndarray:
        """Request's number, place and bits of the temperature, in the order in which they were written. Shapes: int32
        [E, 3]."""
        return self.words[self.places[TEMPERATURE][:, None] + np.arange(1, HEAD + 1)]

    def begins(self) -> Iterator[np.ndarray]:
        for at, num_bytes in zip(self.places[BEGIN].tolist(), self.seconds(BEGIN).tolist(), strict=True):
            yield self.words[at : at + HEAD + 2 - (-num_bytes // WORD)]

    def names(self) -> Iterator[tuple[str, int]]:
        """Id and seed of what began."""
        for entry in self.begins():
            name, seed = entry[HEAD + 2 :].tobytes()[: entry[2]], entry[HEAD : HEAD + 2].tobytes()
            yield name.decode(), int.from_bytes(seed, "little")

    def tokens(self, numbers: np.ndarray) -> Iterator[np.ndarray]:
        """Of each token its request's number, itself, the bits of its log-probability and its version, in the order
        that they were drawn: of requests for which `numbers` has another one than -1, which is theirs then. Shapes:
        numbers int32 [R] -> int32 [4, T], one or several."""
        steps, counts = self.places[STEP], self.seconds(STEP).astype(np.int64)
        blocks = np.flatnonzero(np.diff(np.cumsum(counts) // BLOCK)) + 1
        for at, sizes in zip(np.split(steps, blocks), np.split(counts, blocks), strict=True):
            before = np.cumsum(sizes) - sizes
            places = np.repeat(at + HEAD - before, sizes) + np.arange(sizes.sum())
            of = numbers[self.words[places]] if len(places) else np.zeros(0, np.int32)
            live = np.flatnonzero(of >= 0)
            places, strides = places[live], np.repeat(sizes, sizes)[live]
            columns = self.words[places + strides], self.words[places + 2 * strides]
            yield np.stack([of[live], *columns, np.repeat(self.words[at + 1], sizes)[live]])


def _anew(contents: _Contents, numbers: np.ndarray) -> Iterator[np.ndarray]:
    """What is written, in so many writes, for requests for which `numbers` has another one than -1, under that one.
    Shapes: numbers int32 [R] -> int32 [words]."""
    live = numbers[contents.numbers(BEGIN)] >= 0
    begins = [entry.copy() for entry in itertools.compress(contents.begins(), live.tolist())]
    for entry in begins:
        entry[1] = numbers[entry[1]]
    temperatures = contents.temperatures()
    temperatures[:, 0] = numbers[temperatures[:, 0]]
    temperatures = temperatures[temperatures[:, 0] >= 0]
    kinds = np.full((len(temperatures), 1), TEMPERATURE, np.int32)
    yield _framed(*begins, np.concatenate([kinds, temperatures], axis=1).ravel())
    for block in contents.tokens(numbers):
        for run in np.split(block, np.flatnonzero(np.diff(block[3])) + 1, axis=1):
            if run.size:
                yield _framed(np.array([STEP, run[3, 0], run.shape[1]], np.int32), run[:3].ravel())
    ended = numbers[contents.numbers(END)]
    ends = np.stack([np.full(len(ended), END, np.int32), ended, contents.seconds(END)], axis=1)
    yield _framed(ends[ended >= 0].ravel())


def _framed(*entries: np.ndarray) -> np.ndarray:
    return np.concatenate([np.array([sum(map(len, entries))], np.int32), *entries])


def _replace(path: Path, frames: Iterable[np.ndarray]) -> tuple[int, int]:
    """A file in the place of the one there, which is the old one or the new one, whole, to whoever opens it; the new
    one, open, and its number of words.

    Raises: OSError; the old one is there then.
    """
    beside = path.with_name(f"{path.name}.new")
    file = os.open(beside, ANEW, 0o600)
    try:
        with os.fdopen(file, "wb", closefd=False) as buffered:
            num_bytes = sum(buffered.write(frame.data) for frame in frames)
        os.replace(beside, path)
    except OSError:
        os.close(file)
        beside.unlink(missing_ok=True)
        raise
    return file, num_bytes // WORD


def _append_response(words: array[int], number: int, response: Completion) -> None:
    """As steps, one for each run of tokens of a version."""
    if not len(response.token_ids):
        return
    cuts = np.flatnonzero(np.diff(response.versions)) + 1
    for first, last in itertools.pairwise([0, *cuts.tolist(), len(response.token_ids)]):
        words.extend((STEP, int(response.versions[first]), last - first))
        words.extend([number] * (last - first))
        words.extend(response.token_ids[first:last].tolist())
        words.frombytes(np.asarray(response.logp[first:last], np.float32).tobytes())


def _append_temperature(words: array[int], number: int, place: int, temperature: float) -> None:
    words.extend((TEMPERATURE, number, place))
    words.frombytes(np.float32(temperature).tobytes())


def _append_temperature_runs(words: array[int], number: int, temperatures: np.ndarray | None) -> None:
    """One for each run of tokens with the same temperature."""
    if temperatures is None or not len(temperatures):
        return
    cuts = np.flatnonzero(np.diff(temperatures)) + 1
    for place in [0, *cuts.tolist()]:
        _append_temperature(words, number, place, float(temperatures[place]))


def _temperatures(runs: Sequence[tuple[int, float]], num_tokens: int) -> np.ndarray | None:
    """Temperature of each token of a response; None where none is known. Shapes: float32 [num_tokens]."""
    if not runs:
        return None
    temperatures = np.empty(num_tokens, np.float32)
    for place, temperature in runs:
        temperatures[place:] = temperature
    return temperatures
