"""Base class of engines that this process steps itself: it keeps the requests in progress.

Nothing runs between two steps, so a submission, an abort or a weight update between them has no race: the version of a
token is the version of the weights at its step.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.engines.step_output import StepOutput
from mcore_rl.engines.stop_strings import Decode, StopScanner
from mcore_rl.errors import ConfigError, DataError, McoreRLError, WeightSyncError
from mcore_rl.types import Completion, Delta, GenerationRequest, JsonFormat, TokenSets

FINISHED = ("stop", "length")


@dataclass
class ActiveRequest:
    """Request in progress. The lists include the partial response that it was submitted with."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sets: list[np.ndarray] = field(default_factory=list)
    """Runs of the sets of the tokens since the submission, see TokenSets."""
    keeps_sets: bool = False
    """SamplingOptions.keeps_sets of the request."""
    stops: StopScanner | None = None

    @property
    def num_resumed_tokens(self) -> int:
        """Number of response tokens that the request was submitted with."""
        return 0 if self.request.partial is None else len(self.request.partial.token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response: the position of the next token."""
        return len(self.request.token_ids) + len(self.token_ids)

    @property
    def num_routed(self) -> int:
        """Number of tokens that the model has processed: all tokens of prompt and response except the last."""
        return self.num_tokens - 1


class SteppedEngine(ABC):
    """Request handling of a ports.Engine; subclasses run the model.

    captures_routing: completions contain the experts of their tokens.
    decode: required for requests with stop strings.
    """

    vocab_size: int
    weight_version = 0
    weights_complete = True
    """False until there are weights, and after an update was begun until an update has been completed."""

    def __init__(self, config: RolloutConfig, *, captures_routing: bool, decode: Decode | None = None) -> None:
        self._config = config
        self._decode = decode
        self._captures_routing = captures_routing
        self._running: dict[str, ActiveRequest] = {}
        """Requests by the engine's id. A request that is submitted again gets a new id."""
        self._engine_ids: dict[str, str] = {}
        self._submissions = itertools.count()
        self._may_use_stops = False
        """False if no running request has stop strings; then no step looks at all requests."""
        self._held: tuple[int, list[StepOutput]] | None = None
        """Results that the next step returns, and the version of their weights."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running_ids(self) -> list[str]:
        """Request ids in the order of submission."""
        return list(self._engine_ids)

    @abstractmethod
    def _require_awake(self) -> None:
        """Raise an error if the engine is asleep."""

    @abstractmethod
    def _add(self, added: Mapping[str, ActiveRequest]) -> None:
        """Add requests to the engine in this order, by the engine's id.

        The engine gets the prompt with the partial response, and the remaining token budget.
        """

    @abstractmethod
    def _run_step(self, limit: int) -> list[StepOutput]:
        """Run one forward pass, or up to `limit` passes until a request finishes. Returns the results of the requests
        that got tokens or finished, one per request."""

    def _limit_drafts(self, max_tokens: float) -> None:  # noqa: B027
        """Drop drafts with which a request could get more than `max_tokens` tokens in the next pass. Engines without
        drafts have none to drop."""

    @abstractmethod
    def _cancel(self, engine_ids: Sequence[str]) -> None: ...

    @abstractmethod
    def _routing_of(self, engine_ids: Collection[str]) -> dict[str, np.ndarray]:
        """Return the experts of all tokens except the last, for requests that are running or finished in this step.

        Requests whose experts the engine does not hold completely are absent.
        """

    @abstractmethod
    def _sets_of(
        self, wanted: Mapping[str, tuple[int, int]], ended: Sequence[str]
    ) -> Mapping[str, Sequence[np.ndarray]]:
        """Return the runs (see TokenSets) of tokens of requests with SamplingOptions.keep_mask, and forget them.

        wanted: (position in the sequence of prompt and response of the first token, number of tokens) by request.
        ended: requests to forget, finished in this step.
        """

    def prepare_format(self, form: JsonFormat) -> None:
        """Implement ports.Engine.prepare_format."""
        raise DataError(f"rollout.engine={self._config.engine} does not enforce formats of replies; set it to vllm")

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Implement ports.Engine.submit."""
        self._require_awake()
        for request in requests:
            self._check(request)
        ids = [request.request_id for request in requests]
        if len({*ids} - self._engine_ids.keys()) != len(ids):
            raise ValueError("ids of concurrent requests must differ")
        # The fixed-width number prevents one id from being a prefix of another: SGLang aborts by prefix.
        added = {
            f"{next(self._submissions):012d}~{request.request_id}": self._activate(request) for request in requests
        }
        # Register before `_add`, so that `abort` removes all of them if `_add` fails halfway.
        self._running |= added
        self._engine_ids |= {active.request.request_id: engine_id for engine_id, active in added.items()}
        try:
            self._add(added)
        except BaseException:
            self.abort(ids)
            raise

    def step(self, limit: int = 1, max_tokens: float = math.inf) -> tuple[list[Delta], list[Completion]]:
        """Implement ports.Engine.step."""
        if not self._running:
            return [], []
        self._require_awake()
        self._require_complete()
        self._limit_drafts(max_tokens)
        limit = int(min(limit, max_tokens))
        self._may_use_stops = self._may_use_stops and any(each.stops is not None for each in self._running.values())
        if self._may_use_stops:
            limit = 1  # stop strings are found between two passes
        version, outputs = self._take_held() or (self.weight_version, self._run_step(limit))
        new, spans, reasons, stopped = [], {}, {}, []
        # Once per token: whatever a run does not use costs at most a comparison here.
        for whole in outputs:
            engine_id = whole.engine_id
            active = self._running[engine_id]
            output = whole if active.stops is None else _until_stop(whole, active.stops)
            # The engine does not evaluate stop strings, so a request that one ends must be cancelled.
            if output.finish_reason is not None and whole.finish_reason is None:
                stopped.append(engine_id)
            if active.keeps_sets:
                spans[engine_id] = active.num_tokens, len(output.token_ids)
            active.token_ids += output.token_ids
            active.logp += output.logp
            active.versions += [version] * len(output.token_ids)
            new.append((active.request.request_id, output))
            if output.finish_reason is not None:
                reasons[engine_id] = output.finish_reason
        # Read the experts before cancelling: cancelled requests lose their KV cache blocks.
        routing = self._routing_of(reasons) if self._captures_routing and reasons else {}
        sets = self._sets_of(spans, [i for i in reasons if i in spans]) if spans else {}
        if stopped:
            self._cancel(stopped)
        for engine_id, runs in sets.items():
            self._running[engine_id].sets += runs
        deltas = [
            Delta(request_id, each.token_ids, each.logp, version, sets.get(each.engine_id) if sets else None)
            for request_id, each in new
        ]
        completions = [self._completion(i, reason, routing.get(i)) for i, reason in reasons.items()]
        for completion in completions:
            del self._running[self._engine_ids.pop(completion.request_id)]
        return deltas, completions

    def abort(self, request_ids: Collection[str]) -> list[Completion]:
        """Implement ports.Engine.abort."""
        engine_ids = [self._engine_ids[i] for i in request_ids if i in self._engine_ids]
        begun = [i for i in engine_ids if len(self._running[i].token_ids) > self._running[i].num_resumed_tokens]
        try:
            routing = self._routing_of(begun) if self._captures_routing and begun else {}
            self._cancel(engine_ids)
            return [self._aborted(i, routing.get(i)) for i in engine_ids]
        finally:  # also if the engine failed
            for engine_id in engine_ids:
                del self._engine_ids[self._running.pop(engine_id).request.request_id]

    def generate(self, requests: Sequence[GenerationRequest], on_finish: Callable[[Completion], None]) -> None:
        """Implement ports.Engine.generate."""
        if self._running:
            raise RuntimeError(f"generate() needs an idle engine: {len(self._running)} requests are running")
        self.submit(requests)
        try:
            while self._running:
                for completion in self.step()[1]:
                    on_finish(completion)
        finally:
            self.abort(self.running_ids)

    def _hold(self, outputs: list[StepOutput]) -> None:
        """Keep the results of a pass that ended between two steps, before the weights change."""
        if outputs:
            self._held = self.weight_version, outputs

    def _take_held(self) -> tuple[int, list[StepOutput]] | None:
        """Return the held results, except for requests that have been aborted since."""
        if self._held is None:
            return None
        (version, outputs), self._held = self._held, None
        return version, [output for output in outputs if output.engine_id in self._running]

    def _require_complete(self) -> None:
        if not self.weights_complete:
            raise WeightSyncError(
                "the engine has no weights yet, holds a part of the update after version "
                f"{self.weight_version}, or has discarded its weights during sleep; it is usable only after a complete "
                "update"
            )

    def _activate(self, request: GenerationRequest) -> ActiveRequest:
        active = _resumed(request)
        active.keeps_sets = request.sampling.keeps_sets
        if request.sampling.stop:
            assert self._decode is not None, "stop strings need a tokenizer"
            active.stops = StopScanner(request.sampling.stop, self._decode, active.token_ids)
            self._may_use_stops = True
        return active

    def _resubmit_unstarted(self) -> None:
        """Submit requests again that have no token since their submission, also not in held results; they move behind
        all other requests.

        Part of their prompt may be in the KV cache, computed with weights that must not influence their first token.
        """
        held = {output.engine_id for output in self._held[1] if output.token_ids} if self._held is not None else set()
        engine_ids = [
            engine_id
            for engine_id, active in self._running.items()
            if len(active.token_ids) == active.num_resumed_tokens and engine_id not in held
        ]
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
        if length + wanted > room:  # in a later turn the prompt contains all earlier turns
            raise DataError(
                f"prompt {name}: {length} tokens and {wanted} of a response exceed rollout.max_prompt_tokens + "
                f"rollout.max_response_tokens = {room}"
            )
        if not 0 <= request.token_ids.min() <= request.token_ids.max() < self.vocab_size:
            raise DataError(f"prompt {name}: a token id is outside the model's vocabulary of {self.vocab_size}")
        if request.sampling.format is not None:
            self.prepare_format(request.sampling.format)
        limit = self._config.max_response_tokens
        if not 0 < wanted <= limit:
            raise ConfigError(f"{wanted} response tokens requested, rollout.max_response_tokens is {limit}")
        if request.partial is not None:
            if len(request.partial.token_ids) >= wanted:
                raise DataError(f"response {name} already has {len(request.partial.token_ids)} of {wanted} tokens")
            if self._captures_routing and request.partial.routed_experts is None and len(request.partial.token_ids):
                raise DataError(f"response {name} is continued without the experts of its tokens")
            if request.sampling.keep_mask and request.partial.kept is None and len(request.partial.token_ids):
                raise DataError(f"response {name} is continued without the sampling sets of its tokens")

    def _completion(self, engine_id: str, reason: str, routing: np.ndarray | None) -> Completion:
        active = self._running[engine_id]
        name, tokens = active.request.request_id, len(active.token_ids)
        if reason not in FINISHED or len(active.logp) != tokens:
            raise RuntimeError(f"the engine finished {name} with {reason!r}, {tokens} tokens, {len(active.logp)} logp")
        if self._captures_routing and (routing is None or len(routing) != active.num_routed):
            raise McoreRLError(f"the engine returned no experts for some of the {active.num_routed} tokens of {name}")
        return _to_completion(active, reason, routing)

    def _aborted(self, engine_id: str, routing: np.ndarray | None) -> Completion:
        # Drop tokens whose experts are lost: they are sampled again with the same seeds, so the same tokens result.
        active = self._running[engine_id]
        lost = self._captures_routing and (routing is None or len(routing) != active.num_routed)
        if lost or len(active.token_ids) == active.num_resumed_tokens:
            active, routing = _resumed(active.request), None
            if active.request.partial is not None:
                return replace(active.request.partial, request_id=active.request.request_id)
        return _to_completion(active, "abort", routing)


def _until_stop(output: StepOutput, stops: StopScanner) -> StepOutput:
    """Cut the output after the token that completes a stop string, if any."""
    for count, token_id in enumerate(output.token_ids, start=1):
        if stops.add(token_id):
            return StepOutput(output.engine_id, output.token_ids[:count], output.logp[:count], "stop")
    return output


def _resumed(request: GenerationRequest) -> ActiveRequest:
    if (partial := request.partial) is None:
        return ActiveRequest(request)
    return ActiveRequest(request, partial.token_ids.tolist(), partial.logp.tolist(), partial.versions.tolist())


def _to_completion(active: ActiveRequest, reason: str, routing: np.ndarray | None) -> Completion:
    """Create the Completion, including the partial response."""
    partial = active.request.partial
    before = partial.routed_experts if partial is not None else None
    # Tokens that the request was submitted with keep the experts of their own sampling: the engine has computed them
    # again, perhaps with newer weights.
    if routing is not None and before is not None:
        routing = np.concatenate([before, routing[len(before) :]])
    sets = None
    if active.request.sampling.keeps_sets:
        kept = [] if partial is None or partial.kept is None else [partial.kept]
        sets = TokenSets.joined([*kept, TokenSets.of(active.sets)])
        _check_sets(active, sets)
    temperatures = None
    if partial is not None and partial.temperatures is not None:
        added = len(active.token_ids) - len(partial.token_ids)
        new = np.full(added, active.request.sampling.temperature, np.float32)
        temperatures = np.concatenate([partial.temperatures, new])
    return Completion(
        active.request.request_id,
        np.array(active.token_ids, np.int32),
        np.array(active.logp, np.float32),
        reason,
        np.array(active.versions, np.int32),
        routing,
        temperatures,
        sets,
    )


def _check_sets(active: ActiveRequest, sets: TokenSets) -> None:
    """Raise McoreRLError unless every token is in the set that it was sampled from."""
    name, tokens = active.request.request_id, np.array(active.token_ids, np.int32)
    if len(sets) != len(tokens):
        raise McoreRLError(f"the engine returned {len(sets)} sampling sets for the {len(tokens)} tokens of {name}")
    if len(outside := np.flatnonzero(~sets.contain(tokens))):
        raise McoreRLError(
            f"rollout.keep_sampling_mask=true: token {tokens[outside[0]]} of {name} is not in the set that it was "
            "sampled from; the engine recorded another distribution than it sampled from"
        )
