"""Record of the sets that SGLang's tokens are sampled from (runs in SGLang's environment).

SGLang 0.5.23 has a record of its own, but only for top-k of limited size. The sampler (sampler.py) leaves the sets of a
batch at its output; they are stored when SGLang appends the tokens to the responses. It appends no sample of an
incomplete prompt, and none of a request that has finished or was preempted meanwhile. Between two calls, the sets of a
batch in flight stay on the device: no batch waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from mcore_rl.engines.set_recorder import SetRecorder

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req

_KEPT = "mcore_rl_kept"
"""Attribute of the output of a batch: the sets of its rows, bool [rows, V]."""


class SetCapture:
    """Sets of the requests that were added, by the engine's id."""

    def __init__(self) -> None:
        self._recorder = SetRecorder()
        self._requests: set[str] = set()

    @property
    def is_needed(self) -> bool:
        """True if the sets of some request are recorded."""
        return bool(self._requests)

    def add(self, requests: Iterable[str]) -> None:
        """Record the sets of requests."""
        self._requests.update(requests)

    def forget(self, requests: Iterable[str]) -> None:
        """Remove requests, whose later tokens are not recorded either; unknown ones are ignored."""
        requests = list(requests)
        self._requests.difference_update(requests)
        self._recorder.forget(requests)

    def take(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, list[np.ndarray]]:
        """Call SetRecorder.take for the requests of this rank among `wanted`."""
        return self._recorder.take({request: span for request, span in wanted.items() if request in self._requests})

    def attach(self, output: LogitsProcessorOutput, kept: torch.Tensor) -> None:
        """Leave the sets of a batch at its output. Shapes: bool [rows, V], at least one row per request."""
        setattr(output, _KEPT, kept)

    @contextmanager
    def appended(self, requests: Sequence[Req], output: LogitsProcessorOutput | None) -> Iterator[None]:
        """Store the sets of the requests that get their token of this batch in the block."""
        before = [len(request.output_ids) for request in requests]
        yield
        rows = [
            row
            for row, request in enumerate(requests)
            if request.rid in self._requests and len(request.output_ids) > before[row]
        ]
        if rows:
            positions = [len(requests[row].origin_input_ids) + before[row] for row in rows]
            self._recorder.record([requests[row].rid for row in rows], positions, getattr(output, _KEPT)[rows])
