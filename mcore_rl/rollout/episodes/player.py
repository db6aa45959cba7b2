"""Runs episodes as coroutines, all of an engine's on one thread beside the one that steps it."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from mcore_rl.config.functions import describe
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import DataError, WorkerDiedError
from mcore_rl.rollout.episodes.builtin import Episode
from mcore_rl.rollout.episodes.engine_client import AttemptClient, EngineClient, WithdrawnError
from mcore_rl.rollout.episodes.limits import EpisodeLimitError, EpisodeLimits
from mcore_rl.rollout.episodes.outcome import ended as outcome_of
from mcore_rl.rollout.episodes.outcome import failed
from mcore_rl.rollout.episodes.session import EpisodePrompt, Session, Surroundings, TokenSource
from mcore_rl.rollout.episodes.single_turn import Attempt, Course
from mcore_rl.rollout.episodes.trace import COMPLETED, FAILED, RUNNING, EpisodeTraces, Record
from mcore_rl.rollout.failures import FAILED_EPISODE
from mcore_rl.rollout.journal import Drawn
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.types import Completion, EpisodeOutcome, GenerationRequest

MAX_TRACEBACK_CHARACTERS = 4000
THREADS = 64
"""For what users' environments do that is not asynchronous."""
T = TypeVar("T")


class WatchedSource:
    """A TokenSource that remembers how the engine failed, whatever an episode makes of the error."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source
        self.failure: Exception | None = None

    async def generate(self, request: GenerationRequest) -> Completion:
        try:
            return await self._source.generate(request)
        except DataError:
            raise  # of the episode: it asked for what no engine can do
        except Exception as error:
            self.failure = self.failure or error
            raise


class EpisodePlayer:
    """A Player on an engine's loop. Episodes of all calls of `play` run beside each other. `around` is what they share;
    it has to be set before the first call."""

    around: Surroundings

    def __init__(
        self, episode: Episode, loop: EngineLoop, config: RolloutConfig, record: Record = lambda *span: None
    ) -> None:
        """`record` takes spans for the timeline."""
        self._episode, self._engine, self._config = episode, loop, config
        self._traces = EpisodeTraces(record)
        self.client = EngineClient(loop)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="environment"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()

    def play(self, attempts: Sequence[Attempt], course: Course, drawn: Mapping[str, Drawn]) -> None:
        """As Player.play. An episode that fails costs itself: its outcome says why."""
        self.run(self._play_all(attempts, course, drawn))

    def shutdown(self) -> None:
        """Ends what runs."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result; it runs where episodes do."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _play_all(self, attempts: Sequence[Attempt], course: Course, drawn: Mapping[str, Drawn]) -> None:
        async def play(place: int) -> None:
            course.ended(place, await self._play(attempts[place], course, drawn))

        tasks = [self._loop.create_task(play(place)) for place in range(len(attempts))]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _play(self, attempt: Attempt, course: Course, drawn: Mapping[str, Drawn]) -> EpisodeOutcome | None:
        """None: it was withdrawn."""
        traced = self._traces.begin(attempt.request.request_id)

        def begin() -> None:
            if traced is not None:
                traced.enter(RUNNING)
            course.begun()

        client = AttemptClient(self.client, drawn, attempt.request.request_id, begin)
        source = WatchedSource(client)
        prompt = attempt.prompt
        limits = EpisodeLimits.of(
            self._config,
            response_tokens=attempt.request.sampling.max_response_tokens,
            turns=prompt.max_turns,
        )
        session = Session(replace(self.around, source=source), attempt.request, prompt, limits, traced)
        ended_in = FAILED
        try:
            outcome = await self._outcome(session, EpisodePrompt.of(prompt), limits.seconds)
            ended_in = COMPLETED if outcome.error is None else FAILED
        except WithdrawnError:
            return None
        finally:
            self._traces.end(traced, ended_in)
            closed = None
            if self.around.tools is not None:
                closed = await self.around.tools.close_episode(session.id)
        if closed is not None and closed.rewards:
            outcome = replace(outcome, extra={**outcome.extra, "episode_rewards_of_tools": dict(closed.rewards)})
        if source.failure is not None:
            raise source.failure
        client.begin()  # one that failed before it asked for anything
        return replace(outcome, taken_over=client.taken_over)

    async def _outcome(self, session: Session, prompt: EpisodePrompt, seconds: float | None) -> EpisodeOutcome:
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                return outcome_of(session, await self._episode.run(session, prompt))
        except EpisodeLimitError as error:
            return self._limited(session, error.reason, str(error))
        except TimeoutError as error:
            if deadline.expired():
                return self._limited(session, "seconds", f"rollout.max_episode_seconds={seconds:g} were over")
            return self._failed(session, error)
        except WorkerDiedError:
            raise  # tools that cannot be started any more
        except Exception as error:  # whatever a user's episode raises
            return self._failed(session, error)

    def _limited(self, session: Session, reason: str, text: str) -> EpisodeOutcome:
        if not session.book.sequences:
            return self._failed(session, DataError(f"{text} before anything was sampled"))
        return outcome_of(session, None, reason=reason)

    def _failed(self, session: Session, error: BaseException) -> EpisodeOutcome:
        shown = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARACTERS:]
        raised = str(error) if isinstance(error, DataError) else f"it raised {describe(error)}"
        end_id = min(self.around.stop_ids, default=0)
        return failed(session, f"{FAILED_EPISODE}: {raised}", shown, end_id, self._engine.engine.weight_version)
