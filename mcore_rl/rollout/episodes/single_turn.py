"""The simplest episode: one turn. It takes no coroutine, since nothing happens between the request and its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mcore_rl.data.transcripts import TextDecoder
from mcore_rl.rollout.journal import Drawn
from mcore_rl.types import Completion, EpisodeOutcome, GenerationRequest, Prompt, Trajectory


@dataclass(frozen=True)
class Attempt:
    """One response to a prompt, whatever it takes; the request is that of its first turn."""

    request: GenerationRequest
    prompt: Prompt


Ended = Callable[[int, EpisodeOutcome], None]
"""Called with the place of an attempt and what became of it, from any thread."""


class Player(Protocol):
    """Makes responses of attempts."""

    def play(self, attempts: Sequence[Attempt], ended: Ended, drawn: Mapping[str, Drawn]) -> None:
        """Returns when all have ended; `drawn` is what lost engines had drawn, by the id of the request.

        Raises: what the engine raises; none of them runs then.
        """


class Generator(Protocol):
    """An Engine or its EngineLoop."""

    def generate(self, requests: Sequence[GenerationRequest], on_finish: Callable[[Completion], None]) -> None: ...


class SingleTurnPlayer:
    def __init__(self, generator: Generator, decoder: TextDecoder) -> None:
        self._generator, self._decoder = generator, decoder

    def play(self, attempts: Sequence[Attempt], ended: Ended, drawn: Mapping[str, Drawn]) -> None:
        """As Player.play."""
        place_of = {attempt.request.request_id: place for place, attempt in enumerate(attempts)}
        left: list[GenerationRequest] = []

        def end(completion: Completion) -> None:
            place = place_of[completion.request_id]
            before = drawn.get(completion.request_id)
            ended(place, self._outcome(attempts[place].request, completion, before))

        for attempt in attempts:
            request = attempt.request
            found = drawn.get(request.request_id)
            if found is None:
                left.append(request)
            elif found.finish_reason is None:
                left.append(replace(request, partial=found.completion))
            else:
                end(found.completion)
        self._generator.generate(left, end)

    def _outcome(self, request: GenerationRequest, completion: Completion, before: Drawn | None) -> EpisodeOutcome:
        trajectory = Trajectory(
            request.token_ids,
            completion.token_ids,
            completion.logp,
            completion.versions,
            routed_experts=completion.routed_experts,
        )
        return EpisodeOutcome(
            (trajectory,),
            self._decoder.decode(completion.token_ids.tolist(), skip_special_tokens=True),
            completion.finish_reason,
            taken_over=0 if before is None else len(before.completion.token_ids),
        )
