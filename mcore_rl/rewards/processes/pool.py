"""Pool of grading processes, so that a grader that hangs or dies fails only its own sample."""

from __future__ import annotations

import os
import pickle
import threading
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import McoreRLError, WorkerDiedError
from mcore_rl.rewards.functions import Sample
from mcore_rl.rewards.processes.dispatcher import Dispatcher
from mcore_rl.rewards.processes.messages import Task
from mcore_rl.rewards.results import failed
from mcore_rl.types import Score


@dataclass
class _Wait:
    """Number of scores that a `collect` still waits for."""

    missing: int


class GradingPool:
    """`config.workers` grading processes, which start immediately. Thread-safe.

    Raises (from submit, collect and wait_ready): ConfigError if a process cannot load the configured function,
    WorkerDiedError if processes cannot be started.
    """

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig | None = None) -> None:
        assert config.workers >= 1  # validated by config.validation
        self._config, self._sandbox = config, sandbox or SandboxConfig()
        self._queue: deque[Task] = deque()
        self._scores: dict[int, Score] = {}
        self._waits: dict[int, _Wait] = {}  # by missing key
        self._num_ready = 0
        self._failure: McoreRLError | None = None
        self._closing = False
        self._signalled = False
        self._changed = threading.Condition()
        # The grading thread waits on file descriptors; a byte in this pipe wakes it. _signalled: the byte is unread.
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="grading", daemon=True)
        self._thread.start()

    def submit(self, samples: Mapping[int, Sample]) -> None:
        """Queue samples, by key, for one call of the grader; return immediately."""
        keys = tuple(samples)
        try:
            task = Task(keys, pickle.dumps(list(samples.values()), pickle.HIGHEST_PROTOCOL))
        except Exception as error:  # pickle calls methods of objects in the user's extra_info
            score = failed(f"the sample cannot be sent to a grader: {error}")
            self._finish([(key, score) for key in keys])
            return
        with self._changed:
            self._check_usable()
            self._queue.append(task)
            self._wake()

    def collect(self, keys: Collection[int]) -> dict[int, Score]:
        """Wait for the scores of submitted `keys`, remove them from the pool and return them by key.

        Several threads may wait for different keys at the same time.
        """
        with self._changed:
            missing = [key for key in keys if key not in self._scores]
            wait = _Wait(len(missing))
            self._waits |= dict.fromkeys(missing, wait)
            self._changed.wait_for(lambda: not wait.missing or self._failure or self._closing)
            self._check_usable()
            return {key: self._scores.pop(key) for key in keys}

    def wait_ready(self) -> None:
        """Wait until every process has loaded its grader."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_ready >= self._config.workers or self._failure or self._closing)
            self._check_usable()

    def shutdown(self) -> None:
        """Kill the processes and drop pending samples. May be called more than once."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._wake()
        self._thread.join()

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise RuntimeError("the grading pool is shut down")

    def _wake(self) -> None:
        if not self._signalled and self._thread.is_alive():
            self._signalled = True
            os.write(self._wake_writer, b"x")

    def _run(self) -> None:
        dispatcher = Dispatcher(self._config, self._sandbox, self._queue, self._finish)
        try:
            while not self._closing:
                dispatcher.start_missing()
                dispatcher.feed()
                if dispatcher.await_answers(self._wake_reader):
                    self._acknowledge_wake()
                self._note_ready(dispatcher.num_ready)
        except McoreRLError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(WorkerDiedError(f"the grading thread failed: {error!r}"))
            raise
        finally:
            dispatcher.kill_all()
            with self._changed:
                os.close(self._wake_reader)
                os.close(self._wake_writer)
                self._signalled = True  # prevents writes to the closed pipe

    def _acknowledge_wake(self) -> None:
        with self._changed:
            os.read(self._wake_reader, 1)
            self._signalled = False

    def _note_ready(self, num_ready: int) -> None:
        if num_ready != self._num_ready:
            with self._changed:
                self._num_ready = num_ready
                self._changed.notify_all()

    def _finish(self, scores: list[tuple[int, Score]]) -> None:
        with self._changed:
            self._scores.update(scores)
            waits = [wait for key, _ in scores if (wait := self._waits.pop(key, None)) is not None]
            for wait in waits:
                wait.missing -= 1
            if not all(wait.missing for wait in waits):
                self._changed.notify_all()

    def _fail(self, error: McoreRLError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
