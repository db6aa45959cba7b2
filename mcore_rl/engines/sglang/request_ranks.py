"""Assignment of requests to the ranks of an SGLang engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from mcore_rl.engines.sglang.settings import NewRequest
from mcore_rl.weights.slices.engine_layout import EngineLayout

T = TypeVar("T")


class RequestRanks:
    """Requests by rank. With attention data parallelism each request runs on one data-parallel rank; the
    tensor-parallel ranks of a data-parallel rank have the same requests.

    The number of waiting and running requests of the ranks is balanced. The assignment depends only on the order of
    the calls.
    """

    def __init__(self, layout: EngineLayout) -> None:
        self._layout = layout
        self._place: dict[str, int] = {}
        """Data-parallel rank of each request."""
        self._counts = [0] * layout.dp

    def divide(self, requests: Sequence[NewRequest]) -> list[list[NewRequest]]:
        """Assign new requests. Returns the requests of each rank, in their order.

        Successive requests with the same prompt get the same rank, where they share its KV cache, up to an even share
        of all requests.
        """
        share = -(-(len(self._place) + len(requests)) // self._layout.dp)
        divided: list[list[NewRequest]] = [[] for _ in self._counts]
        place, prompt = 0, None
        for request in requests:
            if request.token_ids != prompt or self._counts[place] >= share:
                place = self._counts.index(min(self._counts))
            prompt = request.token_ids
            divided[place].append(request)
            self._place[request.engine_id] = place
            self._counts[place] += 1
        return [mine for mine in divided for _ in range(self._layout.tp)]

    def remove(self, engine_ids: Collection[str]) -> None:
        """Remove requests that finished or were aborted."""
        for engine_id in engine_ids:
            place = self._place.pop(engine_id, None)
            if place is not None:
                self._counts[place] -= 1

    def distinct(self, by_rank: Sequence[T]) -> Sequence[T]:
        """Select the results that differ: one tensor-parallel rank of each data-parallel rank."""
        return by_rank[:: self._layout.tp]
