"""Sets that are stored when SGLang appends sampled tokens to responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mcore_rl.engines.sglang.set_capture import SetCapture

VOCABULARY = 8


@dataclass
class FakeRequest:
    rid: str
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)


def captured(requests: list[FakeRequest], sets: SetCapture, kept: list[int], appended: list[str]) -> None:
    """Run a batch whose row i keeps the ids below kept[i]; the requests `appended` get their tokens."""
    output = cast("Any", SimpleNamespace())
    sets.attach(output, torch.arange(VOCABULARY) < torch.tensor(kept)[:, None])
    with sets.appended(cast("Any", requests), output):
        for request in requests:
            request.output_ids += [0] * (request.rid in appended)


def test_set_capture_stores_sets_of_appended_tokens_only() -> None:
    """Samples of incomplete prompts, and of requests that left, are not appended."""
    a, b, c = (FakeRequest(name, [0] * length) for name, length in (("a", 3), ("b", 5), ("c", 2)))
    sets = SetCapture()
    sets.add(["a", "b"])
    captured([a, b, c], sets, [1, 2, 3, 8], ["a", "c"])  # a fourth row is padding
    with pytest.raises(RuntimeError, match="no sampling set for 1 of 1 tokens of b"):
        sets.take({"b": (5, 1)})
    captured([b, a], sets, [4, 5], ["a", "b"])
    taken = sets.take({"a": (3, 2), "b": (5, 1), "other rank": (0, 1)})
    # A set of more than two tokens is a bit set with one word.
    found = {name: [run.tolist() for run in runs] for name, runs in taken.items()}
    assert found == {"a": [[0], [-1, 0b11111]], "b": [[-1, 0b1111]]}
    sets.forget(["a", "b"])
    assert not sets.is_needed


def test_set_capture_does_not_record_the_last_pass_of_an_aborted_request() -> None:
    request, sets = FakeRequest("a", [0]), SetCapture()
    sets.add(["a"])
    captured([request], sets, [1], ["a"])
    sets.forget(["a", "unknown"])
    captured([request], sets, [2], ["a"])
    assert not sets.is_needed
    sets.add(["a"])
    with pytest.raises(RuntimeError, match="no sampling set for 1 of 1 tokens of a, the first at position 1"):
        sets.take({"a": (1, 1)})


def test_set_capture_needs_no_sets_of_other_batches() -> None:
    """Batches of greedy or validation requests have no sets."""
    request, sets = FakeRequest("validation", [0]), SetCapture()
    with sets.appended(cast("Any", [request]), None):
        request.output_ids.append(1)
    assert sets.take({}) == {}
