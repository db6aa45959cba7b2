"""Execution of episodes as coroutines. All episodes of an engine run on one thread, next to the thread that steps the
engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from mcore_rl.config.functions import describe
from mcore_rl.config.rules.rollout import concurrent_episodes
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.errors import DataError, WorkerDiedError
from mcore_rl.rollout.episodes.builtin import Episode
from mcore_rl.rollout.episodes.context import EpisodeContext
from mcore_rl.rollout.episodes.limits import EpisodeLimitError, EpisodeLimits
from mcore_rl.rollout.episodes.outcome import ended as outcome_of
from mcore_rl.rollout.episodes.outcome import failed
from mcore_rl.rollout.episodes.session import EpisodePrompt, Session
from mcore_rl.rollout.episodes.single_turn import Attempt, AttemptBatch
from mcore_rl.rollout.episodes.trace import COMPLETED, FAILED, RUNNING, EpisodeTrace, Record
from mcore_rl.rollout.journal import JournaledResponse
from mcore_rl.rollout.loop import Choose, EngineLoop
from mcore_rl.rollout.reported_requests import Report
from mcore_rl.rollout.results import FAILED_EPISODE
from mcore_rl.types import Completion, Delta, EpisodeOutcome, GenerationRequest

REPORT_SECONDS = 0.05
"""Minimum time between two reports of an engine's new tokens: a reader cannot see a shorter time."""
MAX_TRACEBACK_CHARACTERS = 4000
"""Maximum length of a recorded traceback; its end, with the error, is kept."""
THREADS = 64
"""Threads for synchronous code of users' environments."""
T = TypeVar("T")


class WithdrawnError(BaseException):
    """The engine withdrew a request that had not started; another engine generates the response. Not an Exception, so
    that an episode's `except Exception` cannot catch it."""


class EngineClient:
    """Client of an engine for one asyncio loop. It wakes the loop once for all responses that end in the same step, and
    at most every REPORT_SECONDS for new tokens of requests that report them."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self._ended: deque[tuple[asyncio.Future[Completion], Completion | BaseException]] = deque()
        self._wakes = False
        """True while a wake-up is scheduled."""
        self._sampled: deque[tuple[Report, int, Delta]] = deque()
        self._reports = False
        """True while a call of _report is scheduled."""

    async def generate(
        self, request: GenerationRequest, started: Callable[[], None] | None = None, *, report: Report | None = None
    ) -> Completion:
        """Generate a response. With `started`, the request can be withdrawn until its first token, when `started` is
        called. `report` receives new tokens on the asyncio loop; reports may follow the completion.

        Raises: errors of the engine; DataError for a rejected request; WithdrawnError.
        """
        asyncio_loop = asyncio.get_running_loop()
        ended: asyncio.Future[Completion] = asyncio_loop.create_future()

        def listener(result: Completion | BaseException) -> None:
            self._ended.append((ended, result))
            if not self._wakes:
                self._wakes = True
                with contextlib.suppress(RuntimeError):  # the asyncio loop has been closed
                    asyncio_loop.call_soon_threadsafe(self._settle)

        def sampled(position: int, delta: Delta) -> None:
            assert report is not None
            self._sampled.append((report, position, delta))
            if not self._reports:
                self._reports = True
                with contextlib.suppress(RuntimeError):  # the asyncio loop has been closed
                    asyncio_loop.call_soon_threadsafe(self._report)

        self.loop.submit_nowait([request], listener, started, None if report is None else sampled)
        try:
            completion = await ended
            if completion.finish_reason == "abort":
                raise WithdrawnError
            return completion
        except asyncio.CancelledError:
            # Otherwise the engine would sample a response that nobody receives.
            self.loop.abort_nowait([request.request_id])
            raise

    def _report(self) -> None:
        """Report new tokens, and look for more after REPORT_SECONDS. Ends when there are none."""
        if not self._sampled:
            self._reports = False
            # A token that arrived before this line has not scheduled a call.
            if not self._sampled:
                return
            self._reports = True
        while self._sampled:
            report, position, delta = self._sampled.popleft()
            report(position, delta)
        asyncio.get_running_loop().call_later(REPORT_SECONDS, self._report)

    def _settle(self) -> None:
        self._wakes = False  # reset first, so that results appended from now on schedule another wake-up
        while self._ended:
            ended, result = self._ended.popleft()
            if ended.done():  # cancelled in the meantime
                continue
            if isinstance(result, BaseException):
                ended.set_exception(result)
            else:
                ended.set_result(result)


class AttemptClient:
    """Client of one attempt, whose first request has the id `first_id`. `begin` is called once, when the first
    request or any other work of the attempt starts; until then, the attempt can be withdrawn.

    `recovered` holds responses of lost engines by request id; their tokens are not sampled again. A request with a
    different history has a different id or seed and is sampled completely.
    """

    def __init__(
        self, client: EngineClient, recovered: Mapping[str, JournaledResponse], first_id: str, begin: Callable[[], None]
    ) -> None:
        self._client, self._recovered, self._first_id, self._begin = client, recovered, first_id, begin
        self._has_started = threading.Lock()
        """Locked from the start on, so that only the first caller of `begin` acquires it."""
        self.taken_over = 0
        self.failure: Exception | None = None
        """First error of the engine, which is remembered even if the episode catches it."""

    def begin(self) -> None:
        """Call `begin` once; may be called from the engine's thread and from the episodes' thread."""
        if self._has_started.acquire(blocking=False):
            self._begin()

    async def generate(self, request: GenerationRequest, *, report: Report | None = None) -> Completion:
        """Generate the response to a request; a Sample."""
        try:
            return await self._generate(request, report)
        except DataError:
            raise  # the episode's fault: an invalid request
        except Exception as error:
            self.failure = self.failure or error
            raise

    async def _generate(self, request: GenerationRequest, report: Report | None) -> Completion:
        found = self._recovered.get(request.request_id)
        # The seed includes the history, so a different seed means that a tool answered differently this time.
        if found is not None and found.seed == request.seed:
            self.taken_over += len(found.completion.token_ids)
            if found.finish_reason is not None:
                self.begin()
                await asyncio.wrap_future(self._client.loop.take_over([found]))
                return replace(found.completion, finish_reason=found.finish_reason)
            request = replace(request, partial=found.completion)
            if report is not None:
                report(0, _delta(found.completion))
        if request.request_id == self._first_id and not self._has_started.locked():
            return await self._client.generate(request, self.begin, report=report)
        self.begin()
        return await self._client.generate(request, report=report)


def _delta(partial: Completion) -> Delta:
    """Return the tokens of a partial response."""
    version = int(partial.versions[-1]) if len(partial.versions) else 0
    return Delta(partial.request_id, partial.token_ids.tolist(), partial.logp.tolist(), version)


class EpisodePlayer:
    """Player on an engine's loop. Episodes of all calls of `play` run concurrently. `context` is shared by them and
    must be set before the first call."""

    context: EpisodeContext

    def __init__(
        self, episode: Episode, loop: EngineLoop, config: RolloutConfig, record: Record = lambda *span: None
    ) -> None:
        """Start the event loop of the episodes. `record` receives spans for the timeline."""
        self._episode, self._engine, self._config = episode, loop, config
        self._record = record
        self._traced: set[EpisodeTrace] = set()
        # An engine runs requests in order of arrival. Without a limit, all first turns would run before any second
        # turn, and all conversations would be open at the same time.
        self._slots = asyncio.Semaphore(concurrent_episodes(config))
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        """Attempts that wait for a slot, by the id of their first request; a withdrawn attempt is removed."""
        self.client = EngineClient(loop)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="environment"))
        # daemon: a blocking call in a user's episode must not keep the process alive.
        self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
        self._thread.start()

    def play(self, batch: AttemptBatch) -> None:
        """Same as Player.play. A failed episode does not affect others; its outcome contains the error."""
        self.run(self._play_all(batch))

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

    async def _play_all(self, batch: AttemptBatch) -> None:
        async def play(place: int) -> None:
            attempt = batch.attempts[place]
            async with self._slots:
                is_waiting = self._leave(attempt)
                outcome = await self._play(attempt, batch) if is_waiting else None
            batch.ended(place, outcome)

        with self._lock:
            self._waiting.update(attempt.request.request_id for attempt in batch.attempts)

        tasks = [self._loop.create_task(play(place)) for place in range(len(batch.attempts))]
        # Only errors of the engine or of tool processes arrive here; errors of episodes are part of their outcomes.
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for attempt in batch.attempts:
                self._leave(attempt)
            raise

    def _leave(self, attempt: Attempt) -> bool:
        """Remove an attempt from the waiting ones; return True if it was waiting."""
        with self._lock:
            is_waiting = attempt.request.request_id in self._waiting
            self._waiting.discard(attempt.request.request_id)
            return is_waiting

    async def _play(self, attempt: Attempt, batch: AttemptBatch) -> EpisodeOutcome | None:
        """Run one episode; returns None if it was withdrawn."""
        traced = EpisodeTrace(attempt.request.request_id, self._record, self._traced)

        def begin() -> None:
            traced.enter(RUNNING)
            batch.started()

        client = AttemptClient(self.client, batch.recovered, attempt.request.request_id, begin)
        prompt, max_turns = attempt.prompt, self._config.max_turns
        turns = max_turns if prompt.max_turns is None else min(prompt.max_turns, max_turns)
        limits = EpisodeLimits(self._config, attempt.request.sampling.max_response_tokens, turns)
        context = self.context.offering(prompt.tools)
        session = Session(context, client.generate, attempt, limits, traced, client.begin)
        ended_in = FAILED
        try:
            outcome = await self._outcome(session, EpisodePrompt.of(prompt))
            ended_in = COMPLETED if outcome.error is None else FAILED
        except WithdrawnError:
            return None
        finally:
            traced.end(ended_in)
            closed = None
            if self.context.tools is not None:
                closed = await self.context.tools.close_episode(session.id)
        if closed is not None and closed.rewards:
            outcome = replace(outcome, extra={**outcome.extra, "episode_rewards_of_tools": dict(closed.rewards)})
        if client.failure is not None:
            raise client.failure
        client.begin()  # for an episode that failed before it generated anything
        return replace(outcome, taken_over=client.taken_over) if client.taken_over else outcome

    async def _outcome(self, session: Session, prompt: EpisodePrompt) -> EpisodeOutcome:
        seconds = self._config.max_episode_seconds
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                return outcome_of(session, await self._episode.run(session, prompt))
        except EpisodeLimitError as error:
            reason, text = error.reason, str(error)
        except WorkerDiedError:
            raise  # the tool processes cannot be started any more
        # Any error of a user's episode.
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the player itself is cancelled
            # Only the limit ends an episode normally; a TimeoutError of its own code is a failure.
            if not (isinstance(error, TimeoutError) and deadline.expired()):
                return self._failed(session, error)
            reason, text = "seconds", f"rollout.max_episode_seconds={seconds:g} passed"
        result = session.at_limit()
        if not session.book.sequences:
            return self._failed(session, DataError(f"{text} before anything was sampled"))
        return outcome_of(session, result, reason=reason)

    def _failed(self, session: Session, error: BaseException) -> EpisodeOutcome:
        shown = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARACTERS:]
        raised = str(error) if isinstance(error, DataError) else f"it raised {describe(error)}"
        end_id = min(self.context.stop_ids, default=0)
        return failed(session, f"{FAILED_EPISODE}: {raised}", shown, end_id, self._engine.engine.weight_version)
