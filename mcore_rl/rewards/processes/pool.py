"""Pool of grading processes, so that a grader that hangs or dies fails only its own sample."""

from __future__ import annotations

import os
import pickle
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future

from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import McoreRLError, WorkerDiedError
from mcore_rl.rewards.functions import Sample
from mcore_rl.rewards.processes.dispatcher import Dispatcher
from mcore_rl.rewards.processes.limited_grader import GradingTask
from mcore_rl.rewards.results import failed
from mcore_rl.types import Score


class GradingPool:
    """`config.workers` grading processes, which start immediately. Thread-safe.

    Raises (from submit, collect and wait_ready): ConfigError if a process cannot load the configured function,
    WorkerDiedError if processes cannot be started.
    """

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig | None = None) -> None:
        self._config, self._sandbox = config, sandbox or SandboxConfig()
        self._queue: deque[GradingTask] = deque()
        self._lock = threading.Lock()
        self._scores: dict[int, Future[Score]] = {}
        self._ready = threading.Event()
        self._failure: McoreRLError | RuntimeError | None = None
        # Counter that the grading thread waits on, beside its connections. It is open until `_failure` is set.
        self._wake = os.eventfd(0)
        # A daemon, so that a process that ends without `shutdown` does not wait for it.
        self._thread = threading.Thread(target=self._run, name="grading", daemon=True)
        self._thread.start()

    def submit(self, samples: Mapping[int, Sample]) -> None:
        """Queue samples, by key, for one call of the grader; return immediately."""
        keys = tuple(samples)
        # Pickle in the caller's thread: an object that cannot be pickled fails its own samples only.
        try:
            task = GradingTask(keys, pickle.dumps(list(samples.values()), pickle.HIGHEST_PROTOCOL))
        except Exception as error:  # pickle calls methods of objects in the user's extra_info
            score = failed(f"the sample cannot be sent to a grader: {error}")
            self._finish((key, score) for key in keys)
            return
        with self._lock:
            self._check_usable()
            self._queue.append(task)
            os.eventfd_write(self._wake, 1)

    def collect(self, keys: Collection[int]) -> dict[int, Score]:
        """Wait for the scores of submitted `keys`, remove them from the pool and return them by key.

        Several threads may wait for different keys at the same time.
        """
        with self._lock:
            self._check_usable()
            futures = {key: self._future(key) for key in keys}
        scores = {key: future.result() for key, future in futures.items()}
        with self._lock:
            for key in scores:
                del self._scores[key]
        return scores

    def wait_ready(self) -> None:
        """Wait until every process has loaded its grader."""
        self._ready.wait()
        self._check_usable()

    def shutdown(self) -> None:
        """Kill the processes and drop pending samples. May be called more than once."""
        self._fail(RuntimeError("the grading pool is shut down"))
        self._thread.join()

    def _future(self, key: int) -> Future[Score]:
        # `collect` may come before `submit`: a response waits in the manager until its batch is complete.
        return self._scores.setdefault(key, Future())

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        # This thread starts the processes, because they end with the thread that started them (child.Child).
        dispatcher = Dispatcher(self._config, self._sandbox, self._queue, self._finish)
        try:
            while self._failure is None:
                if dispatcher.step(self._wake):
                    os.eventfd_read(self._wake)
                if dispatcher.num_ready >= self._config.workers:
                    self._ready.set()
        except McoreRLError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(WorkerDiedError(f"the grading thread failed: {error!r}"))
            raise
        finally:
            dispatcher.kill_all()
            with self._lock:  # _fail may still hold it for its write
                os.close(self._wake)

    def _finish(self, scores: Iterable[tuple[int, Score]]) -> None:
        with self._lock:
            for key, score in scores:
                if not (future := self._future(key)).done():  # _fail may have ended it
                    future.set_result(score)

    def _fail(self, error: McoreRLError | RuntimeError) -> None:
        """End the grading thread and every wait. Only the first error counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            os.eventfd_write(self._wake, 1)
            self._ready.set()
            for future in self._scores.values():
                if not future.done():
                    future.set_exception(error)
