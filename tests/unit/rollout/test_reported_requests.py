"""Tokens that are reported while they are sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mcore_rl.rollout.reported_requests import ReportedRequests
from mcore_rl.types import Completion, Delta, GenerationRequest, SamplingOptions


def request(name: str, num_partial: int = 0) -> GenerationRequest:
    made = GenerationRequest(name, np.zeros(1, np.int32), 0, SamplingOptions(9))
    ids = np.arange(num_partial, dtype=np.int32)
    partial = Completion(name, ids, ids.astype(np.float32), "abort", ids) if num_partial else None
    return replace(made, partial=partial)


def test_tokens_of_reported_requests_are_reported_with_their_position() -> None:
    reported, found = ReportedRequests(), list[tuple[str, int, list[int]]]()

    def report(position: int, delta: Delta) -> None:
        found.append((delta.request_id, position, delta.token_ids))

    reported.add([request("a"), request("b", 2)], report)
    step = [Delta("a", [5, 6], [0.0, 0.0], 0), Delta("b", [7], [0.0], 0), Delta("other", [8], [0.0], 0)]
    reported.report(step)
    reported.resume([request("a", 1)])  # an abort has lost a token, which is sampled again
    reported.remove(["b"])
    reported.report(step)
    assert found == [("a", 0, [5, 6]), ("b", 2, [7]), ("a", 1, [5, 6])]
