"""Engine with a scripted model: its output is a function of the preceding tokens."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.data.tokenizer import plain_decoder
from mcore_rl.engines.step_output import StepOutput
from mcore_rl.engines.stepped_engine import ActiveRequest, SteppedEngine
from mcore_rl.errors import WorkerDiedError
from mcore_rl.rollout.journal import TokenJournal
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.rollout.tools.interface import ToolResult
from tests.unit.data.chat import made

END = made.CLOSE

Say = Callable[[str], str]
"""Maps the text so far to the model's output with its end token."""


class ScriptedEngine(SteppedEngine):
    """Engine that generates one token of every request per step. Log-probabilities are the negated token id, experts
    are the position. `go` blocks the steps while it is not set, `fails` makes them raise; `version` may change."""

    def __init__(self, tokenizer: Any, say: Say, config: RolloutConfig, *, experts: bool = False) -> None:
        super().__init__(config, captures_routing=experts, decode=plain_decoder(tokenizer))
        self._tokenizer, self._say = tokenizer, say
        self._parts: dict[str, list[int]] = {}
        self.version = 0
        self.submitted: dict[str, int] = {}
        """Seeds by request id."""
        self.go = threading.Event()
        self.go.set()
        self.passing = threading.Event()
        """Set when the first pass begins."""
        self.fails: Exception | None = None
        self.slots: int | None = None
        """Maximum number of concurrent requests; None: no limit."""
        self.cancelled: list[str] = []

    @property
    def weight_version(self) -> int:
        return self.version

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def _require_awake(self) -> None: ...

    def _add(self, added: Any) -> None:
        for engine_id, entry in added.items():
            self.submitted[entry.request.request_id] = entry.request.seed
            text = self._say(self._tokenizer.decode(entry.request.token_ids.tolist()))
            self._parts[engine_id] = self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _run_step(self, limit: int) -> list[StepOutput]:
        self.passing.set()
        self.go.wait(30)
        if self.fails is not None:
            raise self.fails
        return [self._token(engine_id, entry) for engine_id, entry in list(self._running.items())[: self.slots]]

    def _token(self, engine_id: str, entry: ActiveRequest) -> StepOutput:
        part, place = self._parts[engine_id], len(entry.token_ids)
        last = place + 1 == entry.request.sampling.max_response_tokens
        reason = "stop" if place + 1 == len(part) else "length" if last else None
        return StepOutput(engine_id, [part[place]], [-float(part[place])], reason)

    def _cancel(self, engine_ids: Sequence[str]) -> None:
        self.cancelled += engine_ids

    def _sets_of(
        self, wanted: Mapping[str, tuple[int, int]], ended: Sequence[str]
    ) -> Mapping[str, Sequence[np.ndarray]]:
        raise AssertionError("no sets are recorded")

    def _routing_of(self, engine_ids: Collection[str]) -> dict[str, np.ndarray]:
        """Return rows that identify the call which computed them: its number and the position."""
        found = {}
        for engine_id in engine_ids:
            count = self._running[engine_id].num_routed
            rows = np.stack([np.full(count, int(engine_id.split("~")[0])), np.arange(count)], 1)
            found[engine_id] = rows[:, None, :].astype(np.uint8)
        return found


@contextmanager
def served(engine: ScriptedEngine, journal: TokenJournal | None = None) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, journal)

    def serve() -> None:
        with contextlib.suppress(WorkerDiedError):  # waiting callers receive the error
            loop.serve()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        engine.go.set()
        loop.stop()
        thread.join(30)


def call(q: str) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {{"q": "{q}"}}}}\n</tool_call>'


def once(first: str) -> Say:
    """Write `first`, and after the answer of a tool "done"."""
    return lambda text: f"done{END}" if "<|im_start|>tool" in text else f"{first}{END}"


def asks_until_it_has_seen(count: int) -> Callable[[str], str]:
    """Call look(q=number of answers so far), then report the result."""

    def say(text: str) -> str:
        seen = text.count("<|im_start|>tool")
        return f"now {call(str(seen))}{END}" if seen < count else f"done after {seen}{END}"

    return say


def echo(arguments: dict[str, Any]) -> ToolResult:
    return ToolResult(f"found {arguments['q']}", reward=0.5, metrics={"depth": 2.0})
