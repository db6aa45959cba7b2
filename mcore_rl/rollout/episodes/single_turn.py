"""The simplest episode: one turn. It takes no coroutine, since nothing happens between the request and its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from mcore_rl.data.transcripts import TextDecoder, response_text
from mcore_rl.rollout.journal import Drawn
from mcore_rl.rollout.loop import Choose
from mcore_rl.types import Completion, EpisodeOutcome, GenerationRequest, Prompt, Trajectory, extra_of_turns


@dataclass(frozen=True)
class Attempt:
    """One response to a prompt, whatever it takes; the request is that of its first turn. `trained`: its tokens are
    trained on, so they must come from the distribution that the trainer computes."""

    request: GenerationRequest
    prompt: Prompt
    trained: bool = True


@dataclass(frozen=True)
class Course:
    """Is told of each attempt, from any thread: when it begins, and, with its place, what became of it; None: it was
    withdrawn from the engine before it had begun."""

    begun: Callable[[], None]
    ended: Callable[[int, EpisodeOutcome | None], None]


class Player(Protocol):
    """Makes responses of attempts."""

    def play(self, attempts: Sequence[Attempt], course: Course, drawn: Mapping[str, Drawn]) -> None:
        """Returns when all have ended; `drawn` is what lost engines had drawn, by the id of the request.

        Raises: what the engine raises; none of them runs then.
        """

    def withdraw(self, choose: Choose) -> None:
        """As EngineLoop.withdraw, of attempts by the ids of their requests."""


class Generator(Protocol):
    """An EngineLoop."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_finish: Callable[[Completion], None],
        begun: Callable[[], None],
    ) -> None: ...

    def take_over(self, responses: Sequence[Drawn]) -> Future[None]: ...

    def withdraw(self, choose: Choose) -> None: ...


class SingleTurnPlayer:
    def __init__(self, generator: Generator, decoder: TextDecoder) -> None:
        self._generator, self._decoder = generator, decoder

    def play(self, attempts: Sequence[Attempt], course: Course, drawn: Mapping[str, Drawn]) -> None:
        """As Player.play."""
        place_of = {attempt.request.request_id: place for place, attempt in enumerate(attempts)}
        left: list[GenerationRequest] = []

        def end(completion: Completion) -> None:
            place = place_of[completion.request_id]
            if completion.finish_reason == "abort":
                course.ended(place, None)
                return
            before = drawn.get(completion.request_id)
            course.ended(place, self._outcome(attempts[place].request, completion, before))

        # Before anybody hears of them: who takes over from this engine finds them in its journal alone.
        whole = [drawn[request_id] for request_id in place_of if _is_whole(drawn.get(request_id))]
        if whole:
            self._generator.take_over(whole).result()
        for attempt in attempts:
            request = attempt.request
            found = drawn.get(request.request_id)
            if found is None:
                left.append(request)
            elif found.finish_reason is None:
                left.append(replace(request, partial=found.completion))
            else:
                course.begun()
                end(replace(found.completion, finish_reason=found.finish_reason))
        self._generator.generate(left, end, course.begun)

    def withdraw(self, choose: Choose) -> None:
        """As Player.withdraw."""
        self._generator.withdraw(choose)

    def _outcome(self, request: GenerationRequest, completion: Completion, before: Drawn | None) -> EpisodeOutcome:
        trajectory = Trajectory(
            request.token_ids,
            completion.token_ids,
            completion.logp,
            completion.versions,
            routed_experts=completion.routed_experts,
            temperatures=completion.sampled_at(request.sampling.temperature),
        )
        return EpisodeOutcome(
            (trajectory,),
            response_text(self._decoder, completion.token_ids.tolist(), request.sampling.stop),
            completion.finish_reason,
            extra=extra_of_turns(),
            taken_over=0 if before is None else len(before.completion.token_ids),
        )


def _is_whole(found: Drawn | None) -> bool:
    return found is not None and found.finish_reason is not None
