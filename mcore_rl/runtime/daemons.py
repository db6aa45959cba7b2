"""Ray's own processes on this machine: out of reach of signals to the run's process group, and watched."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
from ray._private import services
from ray._private import utils as ray_utils
from ray._private.node import Node

NAMES = ("gcs_server", "raylet")
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_RETURN = 10.0
"""How long after the death of one of them this process may take to end what it does. A call of Ray (2.60) without its
cluster does not return for a minute, whatever its timeout, and no signal interrupts it."""
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def signals_kept_from_ray() -> Iterator[None]:
    """In the block Ray starts or is joined so that a signal to the run is the run's own matter.

    The processes that Ray starts get sessions of their own: `timeout`, schedulers and terminals send their signals to
    a whole process group, and without its cluster a run can neither finish its step nor end in order. TERM is held back
    from them and from theirs, the ranks and engines: a scheduler that knows them by their cgroup sends it to each. The
    kernel still ends them with this process (Ray sets PR_SET_PDEATHSIG). And Ray's own handlers of TERM, which end this
    process, do not stay in the place of ours: one of Python's, and one below it that prints a trace and aborts. Ray
    (2.60) has no option for any of this.
    """
    popen, set_handler = services.ConsolePopen, ray_utils.set_sigterm_handler

    def start(*args: Any, preexec_fn: Callable[[], None] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        def prepare() -> None:
            if preexec_fn is not None:
                preexec_fn()  # Ray's own holds INT back in the same way
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        return popen(*args, preexec_fn=prepare, start_new_session=True, **options)

    services.ConsolePopen = start
    ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        services.ConsolePopen, ray_utils.set_sigterm_handler = popen, set_handler
        for number in HANDLED:
            signal.signal(number, signal.getsignal(number))  # the same again, but over what Ray has put below Python


@contextlib.contextmanager
def services_kept_from_ray() -> Iterator[None]:
    """In the block a cluster starts without what a run never asks: the server of dashboard and jobs (with a port of
    its own, even without dashboard), the autoscaler, and the reader of the logs that stay where they are. Each is a
    Python process that starts, and is waited for, before the first of the run's. Ray (2.60) has no option for it.
    """
    names = ("start_api_server", "start_monitor", "start_log_monitor")
    starts = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, lambda self, **options: None)
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(Node, name, start)


@dataclass
class Daemons:
    """Of the cluster that this process has started, by name; none where it has joined one."""

    processes: Mapping[str, psutil.Process] = field(default_factory=dict)

    @classmethod
    def started(cls) -> Daemons:
        """Those that run now."""
        children = {}
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                children[child.name()] = child
        return cls({name: children[name] for name in NAMES if name in children})

    def dead(self) -> str | None:
        """The name of one that has ended."""
        return next((name for name, process in self.processes.items() if not is_alive(process)), None)


class Guard:
    """Ends a process that is stuck in Ray because one of the daemons under it has died: from another thread it calls
    `give_up` with a sentence that says so, and not before the process has had time to notice by itself."""

    def __init__(self, give_up: Callable[[str], None]) -> None:
        self._give_up = give_up
        self._daemons = Daemons()
        self._intended, self._ended = threading.Event(), threading.Event()

    def watch(self, daemons: Daemons) -> None:
        """From now on."""
        self._daemons = daemons
        threading.Thread(target=self._look, name="guard of Ray's daemons", daemon=True).start()

    def let_end(self) -> None:
        """Whoever lives now dies because this process wants it."""
        if self._daemons.dead() is None:
            self._intended.set()

    def stop(self) -> None:
        """The process has come back from Ray."""
        self._intended.set()
        self._ended.set()

    def _look(self) -> None:
        while not self._intended.wait(SECONDS_BETWEEN_LOOKS):
            if (name := self._daemons.dead()) is not None:
                if not self._ended.wait(SECONDS_TO_RETURN):
                    self._give_up(f"Ray's {name} died, and with it every process of the run")
                return


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that its parent has not waited for has ended too."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def pid_is_alive(pid: int) -> bool:
    """Whether a process with this id runs (see `is_alive`)."""
    try:
        return is_alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False
