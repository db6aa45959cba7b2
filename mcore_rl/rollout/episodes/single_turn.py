"""Single-turn episodes. They need no coroutine, since nothing happens between the request and its completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from mcore_rl.data.transcripts import TextDecoder, response_text
from mcore_rl.rollout.journal import JournaledResponse
from mcore_rl.rollout.loop import Choose, EngineLoop
from mcore_rl.types import Completion, EpisodeOutcome, GenerationRequest, Prompt, Trajectory, extra_of_turns


@dataclass(frozen=True)
class Attempt:
    """One response to a prompt, possibly with several turns. `request` is the request of the first turn.

    `trained`: the tokens are trained on, so they must be sampled from the distribution that the trainer computes.
    """

    request: GenerationRequest
    prompt: Prompt
    trained: bool = True


@dataclass(frozen=True)
class AttemptBatch:
    """Attempts that are played together. `recovered`: responses of lost engines by request id.

    Callbacks, from any thread: `started` when an attempt starts; `ended` with its index and outcome, None if the engine
    withdrew it before it started.
    """

    attempts: Sequence[Attempt]
    started: Callable[[], None]
    ended: Callable[[int, EpisodeOutcome | None], None]
    recovered: Mapping[str, JournaledResponse] = field(default_factory=dict)


class Player(Protocol):
    """Runs attempts."""

    def play(self, batch: AttemptBatch) -> None:
        """Run all attempts and return when they have ended.

        Raises: errors of the engine; no attempt is running then.
        """

    def withdraw(self, choose: Choose) -> None:
        """Same as EngineLoop.withdraw, for attempts by the ids of their first requests."""


class SingleTurnPlayer:
    """Player for single-turn episodes."""

    def __init__(self, loop: EngineLoop, decoder: TextDecoder) -> None:
        self._loop, self._decoder = loop, decoder

    def play(self, batch: AttemptBatch) -> None:
        """Same as Player.play."""
        recovered = batch.recovered
        place_of = {attempt.request.request_id: place for place, attempt in enumerate(batch.attempts)}
        left: list[GenerationRequest] = []

        def end(completion: Completion) -> None:
            place = place_of[completion.request_id]
            if completion.finish_reason == "abort":
                batch.ended(place, None)
                return
            before = recovered.get(completion.request_id)
            batch.ended(place, self._outcome(batch.attempts[place].request, completion, before))

        # Journal them before reporting them: if this engine dies, the next one reads only this engine's journal.
        known = (recovered[request_id] for request_id in place_of if request_id in recovered)
        if finished := [found for found in known if found.finish_reason is not None]:
            self._loop.take_over(finished).result()
        for attempt in batch.attempts:
            request = attempt.request
            found = recovered.get(request.request_id)
            if found is None:
                left.append(request)
            elif found.finish_reason is None:
                left.append(replace(request, partial=found.completion))
            else:
                # This response never reaches the engine, which reports the start of the others.
                batch.started()
                end(replace(found.completion, finish_reason=found.finish_reason))
        self._loop.generate(left, end, batch.started)

    def withdraw(self, choose: Choose) -> None:
        """Same as Player.withdraw."""
        self._loop.withdraw(choose)

    def _outcome(
        self, request: GenerationRequest, completion: Completion, before: JournaledResponse | None
    ) -> EpisodeOutcome:
        sampled = completion.token_ids, completion.logp, completion.versions
        experts, temperatures = completion.routed_experts, completion.sampled_at(request.sampling.temperature)
        trajectory = Trajectory(
            request.token_ids,
            *sampled,
            routed_experts=experts,
            temperatures=temperatures,
            images=request.images,
            kept=completion.kept,
        )
        text = response_text(self._decoder, completion.token_ids.tolist(), request.sampling.stop)
        taken_over = 0 if before is None else len(before.completion.token_ids)
        return EpisodeOutcome(
            (trajectory,), text, completion.finish_reason, extra=extra_of_turns(), taken_over=taken_over
        )
