"""Execution of episodes as coroutines. All episodes of an engine run on one thread, next to the thread that steps the
engine."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from mcore_rl.config.functions import describe
from mcore_rl.config.rules.episodes import concurrent_episodes
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import DataError, WorkerDiedError
from mcore_rl.rollout.episodes.builtin import Episode
from mcore_rl.rollout.episodes.engine_client import AttemptClient, EngineClient, WithdrawnError
from mcore_rl.rollout.episodes.limits import EpisodeLimitError, EpisodeLimits
from mcore_rl.rollout.episodes.outcome import ended as outcome_of
from mcore_rl.rollout.episodes.outcome import failed
from mcore_rl.rollout.episodes.session import EpisodeContext, EpisodePrompt, Session
from mcore_rl.rollout.episodes.single_turn import Attempt, AttemptCallbacks
from mcore_rl.rollout.episodes.trace import COMPLETED, FAILED, RUNNING, EpisodeTraces, Record
from mcore_rl.rollout.journal import JournaledResponse
from mcore_rl.rollout.loop import Choose, EngineLoop
from mcore_rl.rollout.results import FAILED_EPISODE
from mcore_rl.types import EpisodeOutcome

MAX_TRACEBACK_CHARACTERS = 4000
"""Maximum length of a recorded traceback; its end, with the error, is kept."""
THREADS = 64
"""Threads for synchronous code of users' environments."""
T = TypeVar("T")


class EpisodePlayer:
    """Player on an engine's loop. Episodes of all calls of `play` run concurrently. `context` is shared by them and
    must be set before the first call."""

    context: EpisodeContext

    def __init__(
        self, episode: Episode, loop: EngineLoop, config: RolloutConfig, record: Record = lambda *span: None
    ) -> None:
        """Start the event loop of the episodes. `record` receives spans for the timeline."""
        self._episode, self._engine, self._config = episode, loop, config
        self._traces = EpisodeTraces(record)
        # An engine runs requests in order of arrival. Without a limit, all first turns would run before any second
        # turn, and all conversations would be open at the same time.
        self._slots = asyncio.Semaphore(concurrent_episodes(config))
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        """Attempts that wait for a slot, by the id of their first request; a withdrawn attempt is removed."""
        self.client = EngineClient(loop)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="environment"))
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()

    def play(
        self, attempts: Sequence[Attempt], callbacks: AttemptCallbacks, recovered: Mapping[str, JournaledResponse]
    ) -> None:
        """Same as Player.play. A failed episode does not affect others; its outcome contains the error."""
        self.run(self._play_all(attempts, callbacks, recovered))

    def withdraw(self, choose: Choose) -> None:
        """Same as Player.withdraw, for attempts that wait for a slot and for first turns that have not started."""

        def choose_of_both(unstarted: Collection[str]) -> Collection[str]:
            with self._lock:
                chosen = choose(self._waiting.union(unstarted))
                here = self._waiting.intersection(chosen)
                self._waiting -= here
            return [request_id for request_id in chosen if request_id not in here]

        self._engine.withdraw(choose_of_both)

    def shutdown(self) -> None:
        """Stop the loop and its thread; running episodes are abandoned."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, coroutine: Coroutine[object, None, T]) -> T:
        """Run a coroutine on the episodes' thread and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _play_all(
        self, attempts: Sequence[Attempt], callbacks: AttemptCallbacks, recovered: Mapping[str, JournaledResponse]
    ) -> None:
        async def play(place: int) -> None:
            attempt = attempts[place]
            async with self._slots:
                is_waiting = self._leave(attempt)
                outcome = await self._play(attempt, callbacks, recovered) if is_waiting else None
            callbacks.ended(place, outcome)

        with self._lock:
            self._waiting.update(attempt.request.request_id for attempt in attempts)

        tasks = [self._loop.create_task(play(place)) for place in range(len(attempts))]
        # Only errors of the engine or of tool processes arrive here; errors of episodes are part of their outcomes.
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for attempt in attempts:
                self._leave(attempt)
            raise

    def _leave(self, attempt: Attempt) -> bool:
        """Remove an attempt from the waiting ones; return True if it was waiting."""
        with self._lock:
            is_waiting = attempt.request.request_id in self._waiting
            self._waiting.discard(attempt.request.request_id)
            return is_waiting

    async def _play(
        self, attempt: Attempt, callbacks: AttemptCallbacks, recovered: Mapping[str, JournaledResponse]
    ) -> EpisodeOutcome | None:
        """Run one episode; returns None if it was withdrawn."""
        traced = self._traces.begin(attempt.request.request_id)

        def begin() -> None:
            traced.enter(RUNNING)
            callbacks.started()

        client = AttemptClient(self.client, recovered, attempt.request.request_id, begin)
        prompt = attempt.prompt
        max_tokens = attempt.request.sampling.max_response_tokens
        limits = EpisodeLimits.of(self._config, response_tokens=max_tokens, turns=prompt.max_turns)
        context = self.context.offering(prompt.tools)
        session = Session(context, client, attempt.request, prompt, limits, traced, trained=attempt.trained)
        ended_in = FAILED
        try:
            outcome = await self._outcome(session, EpisodePrompt.of(prompt), self._config.max_episode_seconds)
            ended_in = COMPLETED if outcome.error is None else FAILED
        except WithdrawnError:
            return None
        finally:
            self._traces.end(traced, ended_in)
            closed = None
            if self.context.tools is not None:
                closed = await self.context.tools.close_episode(session.id)
        if closed is not None and closed.rewards:
            outcome = replace(outcome, extra={**outcome.extra, "episode_rewards_of_tools": dict(closed.rewards)})
        if client.failure is not None:
            raise client.failure
        client.begin()  # for an episode that failed before it generated anything
        return replace(outcome, taken_over=client.taken_over) if client.taken_over else outcome

    async def _outcome(self, session: Session, prompt: EpisodePrompt, seconds: float | None) -> EpisodeOutcome:
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                return outcome_of(session, await self._episode.run(session, prompt))
        except EpisodeLimitError as error:
            return self._limited(session, error.reason, str(error))
        except TimeoutError as error:
            if deadline.expired():
                return self._limited(session, "seconds", f"rollout.max_episode_seconds={seconds:g} passed")
            return self._failed(session, error)
        except WorkerDiedError:
            raise  # the tool processes cannot be started any more
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the player itself is cancelled
            return self._failed(session, error)  # raised by the user's episode
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # any error of a user's episode
            return self._failed(session, error)

    def _limited(self, session: Session, reason: str, text: str) -> EpisodeOutcome:
        if not session.book.sequences:
            return self._failed(session, DataError(f"{text} before anything was sampled"))
        return outcome_of(session, None, reason=reason)

    def _failed(self, session: Session, error: BaseException) -> EpisodeOutcome:
        shown = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARACTERS:]
        raised = str(error) if isinstance(error, DataError) else f"it raised {describe(error)}"
        end_id = min(self.context.stop_ids, default=0)
        return failed(session, f"{FAILED_EPISODE}: {raised}", shown, end_id, self._engine.engine.weight_version)
