"""What engines have in common that this process steps itself: the responses in progress.

Between two steps nothing runs, so whatever happens there (a submission, an abort, new weights) has no race with
anything: the version of a token is that of the weights at its step.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.stop_strings import Decode, StopScanner
from mcore_rl.errors import ConfigError, DataError, McoreRLError
from mcore_rl.types import Completion, Delta, GenerationRequest

FINISHED = ("stop", "length")


@dataclass(frozen=True)
class Output:
    """What a pass of the engine has for one request, under the engine's own id for it."""

    engine_id: str
    token_ids: list[int]
    logp: list[float]
    finish_reason: str | None


@dataclass
class Running:
    """A response in progress; the lists begin with what it was submitted with."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stops: StopScanner | None = None

    @property
    def submitted_with(self) -> int:
        """Tokens of the response that it had then."""
        return 0 if self.request.partial is None else len(self.request.partial.token_ids)

    @property
    def num_routed(self) -> int:
        """Tokens of the sequence that passes have computed: all but the last one."""
        return len(self.request.token_ids) + len(self.token_ids) - 1


class SteppedEngine(ABC):
    """The part of a ports.Engine that knows requests. `captures_routing`: completions carry the experts of their
    tokens. `decode` is needed for requests with stop strings."""

    def __init__(self, config: RolloutConfig, *, captures_routing: bool, decode: Decode | None = None) -> None:
        self._config = config
        self._decode = decode
        self._captures_routing = captures_routing
        self._running: dict[str, Running] = {}
        """By the engine's id: a request that is submitted again is another one to the engine."""
        self._engine_ids: dict[str, str] = {}
        self._submissions = itertools.count()

    @property
    @abstractmethod
    def weight_version(self) -> int: ...

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running_ids(self) -> list[str]:
        """Of the requests, in the order that they came."""
        return list(self._engine_ids)

    @abstractmethod
    def _require_ready(self) -> None:
        """Raises: what is said to somebody who wants tokens from an engine that can give none now."""

    @abstractmethod
    def _add(self, added: Mapping[str, Running]) -> None:
        """Hands requests to the engine, in this order, by its id: prompt and partial response, and what is left of the
        budget."""

    @abstractmethod
    def _pass(self) -> list[Output]:
        """One forward pass."""

    @abstractmethod
    def _cancel(self, engine_ids: Sequence[str]) -> None: ...

    @abstractmethod
    def _routing_of(self, engine_ids: Collection[str]) -> dict[str, np.ndarray]:
        """Experts of the sequence but its last token, of requests that have ended in this very pass or still run;
        those are absent that the engine does not hold as a whole."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """As ports.Engine.submit."""
        self._require_ready()
        for request in requests:
            self._check(request)
        ids = [request.request_id for request in requests]
        if len({*ids} - self._engine_ids.keys()) != len(ids):
            raise ValueError("ids of requests that run together must differ")
        # No id begins with another one: SGLang takes that for the same.
        added = {f"{next(self._submissions):012d}~{request.request_id}": self._started(request) for request in requests}
        self._running |= added
        self._engine_ids |= {entry.request.request_id: engine_id for engine_id, entry in added.items()}
        try:
            self._add(added)
        except BaseException:
            self.abort(ids)
            raise

    def step(self) -> tuple[list[Delta], list[Completion]]:
        """As ports.Engine.step."""
        if not self._running:
            return [], []
        self._require_ready()
        version, deltas, reasons, stopped = self.weight_version, [], {}, []
        for whole in self._pass():
            entry = self._running[whole.engine_id]
            output = _until_stop(whole, entry.stops)
            if output.finish_reason is not None and whole.finish_reason is None:
                stopped.append(output.engine_id)
            entry.token_ids += output.token_ids
            entry.logp += output.logp
            entry.versions += [version] * len(output.token_ids)
            deltas.append(Delta(entry.request.request_id, output.token_ids, output.logp, version))
            if output.finish_reason is not None:
                reasons[output.engine_id] = output.finish_reason
        routing = self._routing_of(reasons) if self._captures_routing and reasons else {}
        if stopped:
            self._cancel(stopped)
        completions = [self._completion(i, reason, routing.get(i)) for i, reason in reasons.items()]
        for completion in completions:
            del self._running[self._engine_ids.pop(completion.request_id)]
        return deltas, completions

    def abort(self, request_ids: Collection[str]) -> list[Completion]:
        """As ports.Engine.abort."""
        engine_ids = [self._engine_ids[i] for i in request_ids if i in self._engine_ids]
        begun = [i for i in engine_ids if len(self._running[i].token_ids) > self._running[i].submitted_with]
        try:
            routing = self._routing_of(begun) if self._captures_routing and begun else {}
            self._cancel(engine_ids)
            return [self._aborted(i, routing.get(i)) for i in engine_ids]
        finally:  # whatever an engine says that has failed
            for engine_id in engine_ids:
                del self._engine_ids[self._running.pop(engine_id).request.request_id]

    def generate(self, requests: Sequence[GenerationRequest], on_finish: Callable[[Completion], None]) -> None:
        """As ports.Engine.generate."""
        if self._running:
            raise RuntimeError(f"{len(self._running)} requests run: they would be lost")
        self.submit(requests)
        try:
            while self._running:
                for completion in self.step()[1]:
                    on_finish(completion)
        finally:
            self.abort(self.running_ids)

    def _started(self, request: GenerationRequest) -> Running:
        entry = _begun(request)
        if request.sampling.stop:
            assert self._decode is not None, "stop strings need a tokenizer"
            entry.stops = StopScanner(request.sampling.stop, self._decode, entry.token_ids)
        return entry

    def _submit_unbegun_again(self) -> None:
        """What has no token since it was submitted, as if it had come now, after all others that run: a part of its
        prompt may be computed, with weights of which its first token is to know nothing."""
        engine_ids = [i for i, entry in self._running.items() if len(entry.token_ids) == entry.submitted_with]
        self._cancel(engine_ids)
        requests = [self._running.pop(engine_id).request for engine_id in engine_ids]
        for request in requests:
            del self._engine_ids[request.request_id]
        self.submit(requests)

    def _check(self, request: GenerationRequest) -> None:
        name, length, wanted = request.request_id, len(request.token_ids), request.sampling.max_response_tokens
        room = self._config.max_prompt_tokens + self._config.max_response_tokens
        if not length:
            raise DataError(f"prompt {name} is empty")
        if length + wanted > room:  # a later turn follows a prompt and all that was said after it
            raise DataError(
                f"prompt {name}: {length} tokens and {wanted} of a response exceed rollout.max_prompt_tokens + "
                f"rollout.max_response_tokens = {room}"
            )
        if not 0 <= request.token_ids.min() <= request.token_ids.max() < self.vocab_size:
            raise DataError(f"prompt {name}: a token id is not below the model's {self.vocab_size}")
        limit = self._config.max_response_tokens
        if not 0 < wanted <= limit:
            raise ConfigError(f"{wanted} response tokens asked for, rollout.max_response_tokens is {limit}")
        if request.partial is not None:
            if len(request.partial.token_ids) >= wanted:
                raise DataError(f"response {name} has {len(request.partial.token_ids)} tokens of {wanted} already")
            if self._captures_routing and request.partial.routed_experts is None and len(request.partial.token_ids):
                raise DataError(f"response {name} goes on without the experts of the tokens that it has")

    def _completion(self, engine_id: str, reason: str, routing: np.ndarray | None) -> Completion:
        entry = self._running[engine_id]
        name, tokens = entry.request.request_id, len(entry.token_ids)
        if reason not in FINISHED or len(entry.logp) != tokens:
            raise RuntimeError(f"the engine ended {name} with {reason!r}, {tokens} tokens, {len(entry.logp)} logp")
        if self._captures_routing and (routing is None or len(routing) != entry.num_routed):
            raise McoreRLError(f"the engine gave no experts for some of the {entry.num_routed} tokens of {name}")
        return _joined(entry, reason, routing)

    def _aborted(self, engine_id: str, routing: np.ndarray | None) -> Completion:
        """Tokens whose experts are lost with the abort are drawn again: with the same seeds, they are the same."""
        entry = self._running[engine_id]
        lost = self._captures_routing and (routing is None or len(routing) != entry.num_routed)
        if lost or len(entry.token_ids) == entry.submitted_with:
            entry, routing = _begun(entry.request), None
            if entry.request.partial is not None:
                return replace(entry.request.partial, request_id=entry.request.request_id)
        return _joined(entry, "abort", routing)


def _until_stop(output: Output, stops: StopScanner | None) -> Output:
    """The output up to the token that completes a stop string, if one does."""
    if stops is None:
        return output
    for count, token_id in enumerate(output.token_ids, start=1):
        if stops.add(token_id):
            return Output(output.engine_id, output.token_ids[:count], output.logp[:count], "stop")
    return output


def _begun(request: GenerationRequest) -> Running:
    if (partial := request.partial) is None:
        return Running(request)
    return Running(request, partial.token_ids.tolist(), partial.logp.tolist(), partial.versions.tolist())


def _joined(entry: Running, reason: str, routing: np.ndarray | None) -> Completion:
    """Experts of tokens that were drawn before the request was submitted are those of then: weights may have changed,
    and its prefix may have been computed again."""
    partial = entry.request.partial
    before = partial.routed_experts if partial is not None else None
    if routing is not None and before is not None:
        routing = np.concatenate([before, routing[len(before) :]])
    temperatures = None
    if partial is not None and partial.temperatures is not None:
        added = len(entry.token_ids) - len(partial.token_ids)
        new = np.full(added, entry.request.sampling.temperature, np.float32)
        temperatures = np.concatenate([partial.temperatures, new])
    return Completion(
        entry.request.request_id,
        np.array(entry.token_ids, np.int32),
        np.array(entry.logp, np.float32),
        reason,
        np.array(entry.versions, np.int32),
        routing,
        temperatures,
    )
