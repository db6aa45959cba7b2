"""Journal of an engine's sampled tokens (format: journal_contents.py): a file that survives the process, so that other
engines can continue its requests.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mcore_rl.rollout.journal_contents import (
    BEGIN,
    END,
    HEAD,
    RELEASE,
    SET,
    STEP,
    TEMPERATURE,
    WORD,
    JournalContents,
    compacted,
)
from mcore_rl.types import Completion, Delta, GenerationRequest, TokenSets
from model_converters.durable_files import durable_write

REASONS = ("stop", "length")
SMALL_WORDS = 2 * 2**20  # size up to which a file is never rewritten
MAX_GROWTH = 3
"""Growth after which a file is rewritten without released responses; it bounds the total cost of rewriting."""
LOST_JOURNALS = 8
"""Number of cached journals of lost engines: twice the default of rollout.max_engine_restarts and more."""
# O_APPEND: after ftruncate, the next write must start at the new end, not at the old position.
CREATE = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND
_reading = threading.Lock()


class TokenJournal:
    """Journal at `path`; an existing file is overwritten.

    Each call is one write, which survives the process completely or partly; `read_journal` ignores incomplete writes.
    Finished responses stay until they are released. The file is rewritten without released responses when it has more
    than `small_words` words and has grown by MAX_GROWTH.

    If the disk is full, responses can no longer be recovered, but the run continues.
    """

    def __init__(self, path: Path, *, small_words: int = SMALL_WORDS) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._small_words = path, small_words
        self._file: int | None = os.open(path, CREATE, 0o600)
        self._size, self._limit = 0, small_words
        """Current size, and size after which the file is rewritten, in words."""
        self._is_complete = True
        """False after a failed write: then only releases are written."""
        self._running: dict[str, int] = {}
        """Numbers by request id."""
        self._ended: dict[str, dict[str, int]] = {}
        """{id of the episode's first request: {request id: number}}."""
        self._count = 0

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Register running requests; their partial responses count as sampled. Earlier responses with their ids are
        released."""
        self.discard([request.request_id for request in requests])
        words = array("i")
        for request in requests:
            number = self._running[request.request_id] = self._append_begin(words, request.request_id, request.seed)
            place = 0
            if request.partial is not None:
                _append_response(words, number, request.partial)
                # Tokens of unknown temperature count as sampled at the temperature of this request.
                place = len(request.partial.token_ids) if request.partial.temperatures is not None else 0
            _append_temperature(words, number, place, request.sampling.temperature)
        self._write(words)

    def take_over(self, responses: Sequence[JournaledResponse]) -> None:
        """Add responses that had finished on lost engines. Earlier responses with their ids are released."""
        self.discard([sampled.completion.request_id for sampled in responses])
        words = array("i")
        for sampled in responses:
            name, reason = sampled.completion.request_id, sampled.finish_reason
            assert reason is not None, f"{name} has not ended"
            number = self._append_begin(words, name, sampled.seed)
            _append_response(words, number, sampled.completion)
            self._append_end(words, name, number, reason)
        self._write(words)

    def add(self, deltas: Sequence[Delta], completions: Iterable[Completion]) -> None:
        """Add the results of an engine step."""
        words = array("i")
        if deltas:
            numbers = [self._running[delta.request_id] for delta in deltas for _ in delta.token_ids]
            words.extend((STEP, deltas[0].version, len(numbers)))
            words.extend(numbers)
            words.extend([token for delta in deltas for token in delta.token_ids])
            words.frombytes(array("f", [logp for delta in deltas for logp in delta.logp]).tobytes())
            for delta in deltas:
                if delta.kept is not None:
                    _append_sets(words, self._running[delta.request_id], delta.kept)
        for completion in completions:
            name = completion.request_id
            self._append_end(words, name, self._running.pop(name), completion.finish_reason)
        self._write(words)

    def discard(self, request_ids: Iterable[str]) -> None:
        """Release the responses of requests that were aborted or start again."""
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
        """Release finished responses, including later turns of the episodes that these requests started: no other
        engine may continue them."""
        ended = [self._ended.pop(name) for name in request_ids if name in self._ended]
        self._write_releases([number for of_episode in ended for number in of_episode.values()])

    def copy(self, path: Path, request_ids: Iterable[str]) -> None:
        """Write the sampled tokens of these requests, and of later turns of their episodes, durably to another file.

        Raises: OSError.
        """
        wanted = set(request_ids)
        live = [number for name, number in self._running.items() if first_id(name) in wanted]
        live += [number for name in wanted for number in self._ended.get(name, {}).values()]
        # Maps numbers of this file to numbers of the copy; -1 excludes a request.
        numbers = np.full(self._count, -1, np.int32)
        numbers[live] = np.arange(len(live))
        frames = compacted(JournalContents.of(self._path), numbers) if live else iter(())
        with durable_write(path) as file:
            for frame in frames:
                file.write(frame.data)

    def _append_begin(self, words: array[int], name: str, seed: int) -> int:
        """Append a BEGIN entry and return its number."""
        number, encoded = self._count, name.encode()
        self._count += 1
        words.extend((BEGIN, number, len(encoded)))
        words.frombytes(int(seed).to_bytes(8, "little") + encoded + bytes(-len(encoded) % WORD))
        return number

    def _append_end(self, words: array[int], name: str, number: int, reason: str) -> None:
        words.extend((END, number, REASONS.index(reason)))
        self._ended.setdefault(first_id(name), {})[name] = number

    def _write(self, words: array[int]) -> None:
        self._is_complete = self._is_complete and self._has_written(words)

    def _write_releases(self, numbers: Sequence[int]) -> None:
        words = array("i", [word for number in numbers for word in (RELEASE, number, 0)])
        if self._file is not None and not self._has_written(words):
            # Without the release, a later request with the same id could wrongly continue this response.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file, self._is_complete = None, False

    def _has_written(self, words: array[int]) -> bool:
        """Write all words or none; return True on success."""
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
            os.ftruncate(self._file, self._size * WORD)  # entries behind a partial write would be unreadable
        return False

    def _compact(self, file: int) -> None:
        """Rewrite the file without released responses and with new numbers."""
        live = [self._running, *self._ended.values()]
        numbers = np.full(self._count, -1, np.int32)
        old = np.array([number for of_live in live for number in of_live.values()], np.int64)
        numbers[old] = np.arange(len(old))
        try:
            self._file, self._size = _replace(self._path, compacted(JournalContents.of(self._path), numbers))
        except OSError:
            self._limit = 2 * self._size  # try again later
            return
        os.close(file)
        self._limit = max(self._small_words, MAX_GROWTH * self._size)
        self._count = len(old)
        for of_live in live:
            of_live.update({name: int(numbers[number]) for name, number in of_live.items()})


@dataclass
class JournaledResponse:
    """Complete or partial response with the seed of its request. `finish_reason` is None if it had not finished."""

    seed: int
    completion: Completion
    finish_reason: str | None


def first_id(request_id: str) -> str:
    """Return the id of the request that started the episode; later turns append `/...` to it."""
    return request_id.partition("/")[0]


def read_journal(path: Path) -> dict[str, JournaledResponse]:
    """Read the unreleased responses, complete or partial, by request id; {} if there is no journal."""
    try:
        contents = JournalContents.of(path)
    except OSError:
        return {}
    numbers, released = contents.numbers(BEGIN), contents.numbers(RELEASE)
    # Releases are applied last: a number is never reused within a file, so their position does not matter.
    kept = np.full(1 + max(numbers.max(initial=-1), released.max(initial=-1)), -1, np.int32)
    kept[numbers] = numbers
    kept[released] = -1
    names = dict(zip(numbers.tolist(), contents.names(), strict=True))
    reasons = dict(zip(contents.numbers(END).tolist(), contents.seconds(END).tolist(), strict=True))
    runs: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for number, place, bits in contents.temperatures().tolist():
        runs[number].append((place, float(np.int32(bits).view(np.float32))))
    sets: defaultdict[int, list[np.ndarray]] = defaultdict(list)
    for entry in contents.sets(kept):
        sets[int(entry[1])].append(entry[HEAD:])
    sampled = np.concatenate(list(contents.tokens(kept)), axis=1)
    # A stable sort groups the tokens by request and keeps their order within each request.
    sampled = sampled[:, np.argsort(sampled[0], kind="stable")]
    starts = np.flatnonzero(np.diff(sampled[0], prepend=-1))
    responses = {}
    for number, response in zip(sampled[0, starts].tolist(), np.split(sampled, starts[1:], axis=1), strict=False):
        # Copied, because a slice would keep the tokens of all responses in memory.
        _, tokens, logp, versions = response.copy()
        (name, seed), reason = names[number], REASONS[reasons[number]] if number in reasons else None
        temperatures = _temperatures(runs.get(number, ()), len(tokens))
        completion = Completion(
            *(name, tokens, logp.view(np.float32), reason or "abort", versions),
            temperatures=temperatures,
            kept=TokenSets.of(sets[number]) if number in sets else None,
        )
        responses[name] = JournaledResponse(seed, completion, reason)
    return responses


def read_lost_journal(path: str) -> Mapping[str, Mapping[str, JournaledResponse]]:
    """Read the journal of an engine that has died, so that it does not change any more: responses by request id, by the
    first id of their episode. Many requests, in several threads, continue from it: the last journals are cached, and
    each is read once."""
    with _reading:
        return _lost_journal(path)


@functools.lru_cache(maxsize=LOST_JOURNALS)
def _lost_journal(path: str) -> Mapping[str, Mapping[str, JournaledResponse]]:
    episodes: defaultdict[str, dict[str, JournaledResponse]] = defaultdict(dict)
    for name, response in read_journal(Path(path)).items():
        episodes[first_id(name)][name] = response
    return dict(episodes)


def _replace(path: Path, frames: Iterable[np.ndarray]) -> tuple[int, int]:
    """Replace a file atomically. Returns the open new file and its number of words.

    Raises: OSError; the old file still exists then.
    """
    beside = path.with_name(f"{path.name}.new")
    file = os.open(beside, CREATE, 0o600)
    try:
        # The descriptor stays open: it becomes the journal's own.
        with os.fdopen(file, "wb", closefd=False) as buffered:
            num_bytes = sum(buffered.write(frame.data) for frame in frames)
        os.replace(beside, path)
    except OSError:
        os.close(file)
        beside.unlink(missing_ok=True)
        raise
    return file, num_bytes // WORD


def _append_response(words: array[int], number: int, response: Completion) -> None:
    """Append a STEP entry for each run of tokens with the same version, and a TEMPERATURE entry for each run with the
    same temperature."""
    if not len(response.token_ids):
        return
    cuts = np.flatnonzero(np.diff(response.versions)) + 1
    for first, last in itertools.pairwise([0, *cuts.tolist(), len(response.token_ids)]):
        words.extend((STEP, int(response.versions[first]), last - first))
        words.extend([number] * (last - first))
        words.extend(response.token_ids[first:last].tolist())
        words.frombytes(np.asarray(response.logp[first:last], np.float32).tobytes())
    if response.kept is not None:
        _append_sets(words, number, np.split(response.kept.words, response.kept.offsets[1:-1]))
    if response.temperatures is not None:
        for place in [0, *(np.flatnonzero(np.diff(response.temperatures)) + 1).tolist()]:
            _append_temperature(words, number, place, float(response.temperatures[place]))


def _append_sets(words: array[int], number: int, runs: Sequence[np.ndarray]) -> None:
    for run in runs:
        words.extend((SET, number, len(run)))
        words.frombytes(run.astype(np.int32, copy=False).tobytes())


def _append_temperature(words: array[int], number: int, place: int, temperature: float) -> None:
    words.extend((TEMPERATURE, number, place))
    words.frombytes(np.float32(temperature).tobytes())


def _temperatures(runs: Sequence[tuple[int, float]], num_tokens: int) -> np.ndarray | None:
    """Return the temperature of each token of a response; None if unknown. Shapes: float32 [num_tokens]."""
    if not runs:
        return None
    temperatures = np.empty(num_tokens, np.float32)
    for place, temperature in runs:
        temperatures[place:] = temperature
    return temperatures
