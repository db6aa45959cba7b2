"""What an engine has drawn, in a file that outlives its process: whoever takes over its requests goes on from there.

Words of 4 bytes. Whatever is written at once begins with the number of words that follow. A request begins with [BEGIN,
its number, bytes of its id, seed (2 words), id, padded]; a step is [STEP, version, count, numbers, tokens,
log-probabilities], one of each per token; a response ends with [END, its number, index of its reason].
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mcore_rl.types import Completion, Delta, GenerationRequest

BEGIN, STEP, END = 1, 2, 3
REASONS = ("stop", "length")
WORD = 4


class Journal:
    """Written at `path`, anew. Each call is one write, which survives the process whole or in part: `read_journal`
    leaves out what is not whole. A disk that is full costs what could be taken over, never the run."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND, 0o600)
        self._numbers: dict[str, int] = {}
        """Of the requests that run, by id."""
        self._count = 0

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """They run from now on; what they came with counts as drawn. When none ran before, the file begins anew."""
        self.forget_ended()
        words = array("i")
        for request in requests:
            number = self._numbers[request.request_id] = self._count
            self._count += 1
            name = request.request_id.encode()
            words.extend((BEGIN, number, len(name)))
            words.frombytes(int(request.seed).to_bytes(8, "little") + name + bytes(-len(name) % WORD))
            if request.partial is not None:
                _append_response(words, number, request.partial)
        self._write(words)

    def add(self, deltas: Sequence[Delta], completions: Iterable[Completion]) -> None:
        """What a step has done."""
        words = array("i")
        if deltas:
            numbers = [self._numbers[delta.request_id] for delta in deltas for _ in delta.token_ids]
            words.extend((STEP, deltas[0].version, len(numbers)))
            words.extend(numbers)
            words.extend([token for delta in deltas for token in delta.token_ids])
            words.frombytes(array("f", [logp for delta in deltas for logp in delta.logp]).tobytes())
        for completion in completions:
            words.extend((END, self._numbers.pop(completion.request_id), REASONS.index(completion.finish_reason)))
        self._write(words)

    def forget_ended(self) -> None:
        """The file begins anew, if no request runs: what was drawn has been taken by then, or is of earlier weights."""
        if not self._numbers and self._file is not None:
            os.ftruncate(self._file, 0)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that were aborted."""
        for request_id in request_ids:
            self._numbers.pop(request_id, None)

    def _write(self, words: array[int]) -> None:
        if self._file is None or not words:
            return
        words.insert(0, len(words))
        try:
            written = os.write(self._file, words.tobytes())
        except OSError:
            written = 0
        if written < len(words) * WORD:  # nobody could read on behind a gap
            os.close(self._file)
            self._file = None


@dataclass
class Drawn:
    """A response, or its beginning, and the seed of its request. `finish_reason`: None where it had not ended."""

    seed: int
    completion: Completion
    finish_reason: str | None


def read_journal(path: Path) -> dict[str, Drawn]:
    """Responses by the id of the request, also those that have ended; {} where there is no journal."""
    try:
        words = np.fromfile(path, dtype=np.int32)
    except OSError:
        return {}
    names: dict[int, tuple[str, int]] = {}
    reasons: dict[int, str] = {}
    steps: list[tuple[np.ndarray, ...]] = []
    for kind, first, second, body in _entries(words):
        if kind == BEGIN:
            seed, name = body[:2].tobytes(), body[2:].tobytes()[:second]
            names[first] = name.decode(), int.from_bytes(seed, "little")
        elif kind == END:
            reasons[first] = REASONS[second]
        else:
            numbers, tokens, logp = body.reshape(3, second)
            steps.append((numbers, tokens, logp.view(np.float32), np.full(second, first, np.int32)))
    return _responses(names, reasons, steps)


def _entries(words: np.ndarray) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """(kind, the two words after it, and what follows them) of everything that was written whole."""
    at = 0
    while at < len(words) and at + 1 + words[at] <= len(words):
        at, end = at + 1, at + 1 + int(words[at])
        while at < end:
            kind, first, second = words[at : at + 3].tolist()
            size = {BEGIN: 2 + -(-second // WORD), STEP: 3 * second, END: 0}[kind]
            yield kind, first, second, words[at + 3 : at + 3 + size]
            at += 3 + size


def _responses(
    names: dict[int, tuple[str, int]],
    reasons: dict[int, str],
    steps: Sequence[tuple[np.ndarray, ...]],
) -> dict[str, Drawn]:
    if not steps:
        return {}
    numbers, tokens, logp, versions = (np.concatenate(column) for column in zip(*steps, strict=True))
    order = np.argsort(numbers, kind="stable")
    found, starts = np.unique(numbers[order], return_index=True)
    responses = {}
    for number, rows in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
        name, seed = names[number]
        reason = reasons.get(number)
        completion = Completion(name, tokens[rows], logp[rows], reason or "abort", versions[rows])
        responses[name] = Drawn(seed, completion, reason)
    return responses


def _append_response(words: array[int], number: int, response: Completion) -> None:
    """As steps, one for each run of tokens of a version."""
    cuts = np.flatnonzero(np.diff(response.versions)) + 1
    for rows in np.split(np.arange(len(response.token_ids)), cuts):
        words.extend((STEP, int(response.versions[rows[0]]), len(rows)))
        words.extend([number] * len(rows))
        words.extend(response.token_ids[rows].tolist())
        words.frombytes(np.asarray(response.logp[rows], np.float32).tobytes())
