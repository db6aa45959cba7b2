"""Engine without a model: token i of a response is (seed + i) mod 50."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.step_output import StepOutput
from mcore_rl.engines.stepped_engine import ActiveRequest, SteppedEngine

VOCABULARY = 50


class FakeEngine(SteppedEngine):
    """Runs `slots` requests at a time, in order of arrival. Each gets one token per step, and ends with token 0 or at
    its limit. `before_pass` may raise."""

    vocab_size = VOCABULARY

    def __init__(self, slots: int = 4) -> None:
        super().__init__(RolloutConfig(max_prompt_tokens=32, max_response_tokens=64), captures_routing=False)
        self.slots, self.num_passes, self.version = slots, 0, 0
        self.before_pass: Callable[[], None] = lambda: None
        self.added: list[str] = []
        self.cancelled: list[str] = []

    def _require_awake(self) -> None: ...

    def _add(self, added: dict[str, ActiveRequest]) -> None:  # type: ignore[override]
        self.added += [entry.request.request_id for entry in added.values()]

    def _run_step(self, limit: int) -> list[StepOutput]:
        self.before_pass()
        self.num_passes += 1
        outputs = []
        for engine_id, entry in list(self._running.items())[: self.slots]:
            token = (entry.request.seed + len(entry.token_ids)) % VOCABULARY
            last = len(entry.token_ids) + 1 == entry.request.sampling.max_response_tokens
            reason = "stop" if token == 0 else "length" if last else None
            outputs.append(StepOutput(engine_id, [token], [-float(token)], reason))
        return outputs

    def _cancel(self, engine_ids: Sequence[str]) -> None:
        self.cancelled += engine_ids

    def _sets_of(
        self, wanted: Mapping[str, tuple[int, int]], ended: Sequence[str]
    ) -> Mapping[str, Sequence[np.ndarray]]:
        raise AssertionError("no sets are recorded")

    def _routing_of(self, engine_ids: Collection[str]) -> dict[str, np.ndarray]:
        raise AssertionError("nobody asked for experts")
