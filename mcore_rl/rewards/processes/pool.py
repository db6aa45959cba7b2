"""Grades samples in child processes, so that a grader that hangs or dies fails one sample only."""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import threading
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future

from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import McoreRLError, WorkerDiedError
from mcore_rl.rewards.functions import Sample
from mcore_rl.rewards.processes.dispatcher import Dispatcher
from mcore_rl.rewards.processes.messages import Task
from mcore_rl.rewards.results import failed
from mcore_rl.types import Score


class GradingPool:
    """`config.workers` grading processes, which start immediately. Thread-safe.

    Raises (from submit, collect and wait_ready): ConfigError if a process cannot load the configured function,
    WorkerDiedError if processes cannot be started.
    """

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig | None = None) -> None:
        assert config.workers >= 1  # config.validation rejects less
        self._config, self._sandbox = config, sandbox or SandboxConfig()
        self._queue: deque[Task] = deque()
        self._scores: dict[int, Future[Score]] = {}  # not yet collected
        self._ready: Future[None] = Future()
        self._error: Exception | None = None
        self._closing = False
        self._signalled = False
        self._lock = threading.Lock()
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="grading", daemon=True)
        self._thread.start()

    def submit(self, samples: Mapping[int, Sample]) -> None:
        """Queue samples, by key, for one call of the grader; return immediately."""
        scores: dict[int, Future[Score]] = {key: Future() for key in samples}
        tasks: list[Task] = []
        try:
            tasks.append(Task(tuple(samples), pickle.dumps(list(samples.values()), pickle.HIGHEST_PROTOCOL)))
        except Exception as error:  # pickle calls methods of objects in the user's extra_info
            for score in scores.values():
                score.set_result(failed(f"the sample cannot be sent to a grader: {error}"))
        with self._lock:
            self._check_usable()
            self._scores |= scores
            self._queue += tasks
            self._wake()

    def collect(self, keys: Collection[int]) -> dict[int, Score]:
        """Wait for the scores of submitted `keys`, remove them from the pool and return them by key.

        Several threads may wait for different keys at the same time.
        """
        with self._lock:
            self._check_usable()
            scores = {key: self._scores[key] for key in keys}
        concurrent.futures.wait(scores.values())
        with self._lock:
            for key in keys:
                del self._scores[key]
        return {key: score.result() for key, score in scores.items()}

    def wait_ready(self) -> None:
        """Wait until every process has loaded its grader."""
        self._ready.result()

    def shutdown(self) -> None:
        """Kill the processes and drop pending samples. May be called more than once."""
        with self._lock:
            self._closing = True
            self._wake()
        self._thread.join()

    def _check_usable(self) -> None:
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if not self._signalled:
            self._signalled = True
            os.write(self._wake_writer, b"x")

    def _run(self) -> None:
        dispatcher = Dispatcher(self._config, self._sandbox, self._queue, self._finish)
        error: Exception = RuntimeError("the grading pool is shut down")
        try:
            while not self._closing:
                dispatcher.start_missing()
                dispatcher.feed()
                if dispatcher.await_answers(self._wake_reader):
                    self._acknowledge_wake()
                if dispatcher.num_ready == self._config.workers and not self._ready.done():
                    self._ready.set_result(None)
        except McoreRLError as raised:
            error = raised
        except BaseException as raised:
            error = WorkerDiedError(f"the grading thread failed: {raised!r}")
            raise
        finally:
            self._end(error)
            dispatcher.kill_all()

    def _acknowledge_wake(self) -> None:
        with self._lock:
            os.read(self._wake_reader, 1)
            self._signalled = False

    def _finish(self, scores: list[tuple[int, Score]]) -> None:
        for key, score in scores:
            self._scores[key].set_result(score)

    def _end(self, error: Exception) -> None:
        """Raise `error` from current and later calls."""
        with self._lock:
            self._error = error
            self._signalled = True  # nobody writes to the closed pipe
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            pending: list[Future[Score] | Future[None]] = [*self._scores.values(), self._ready]
            for waiting in pending:
                if not waiting.done():
                    waiting.set_exception(error)
