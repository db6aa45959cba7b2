"""Ray's daemons on this host: protected from signals to the run's process group, and watched."""

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
"""Time for this process to end by itself after the death of a daemon. A call of Ray (2.60) without its cluster does not
return for a minute, regardless of its timeout, and no signal interrupts it."""
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def signals_kept_from_ray() -> Iterator[None]:
    """Let only this process handle signals to the run, for a Ray that is started or joined in the block.

    Processes that Ray starts get sessions of their own: `timeout`, schedulers and terminals send signals to a whole
    process group, and without its cluster a run can neither finish its step nor shut down cleanly. TERM is blocked in
    them and in their children, the ranks and engines, because a scheduler may send it to every process of a cgroup. The
    kernel still ends them with this process (Ray sets PR_SET_PDEATHSIG). Ray's handlers of TERM, which would end this
    process, do not replace ours: one in Python, and one in C++ that prints a trace and aborts. Ray (2.60) has no option
    for any of this.
    """
    popen, set_handler = services.ConsolePopen, ray_utils.set_sigterm_handler

    def start(*args: Any, preexec_fn: Callable[[], None] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        def prepare() -> None:
            if preexec_fn is not None:
                preexec_fn()  # Ray's own function blocks INT in the same way
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        return popen(*args, preexec_fn=prepare, start_new_session=True, **options)

    services.ConsolePopen = start
    ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        services.ConsolePopen, ray_utils.set_sigterm_handler = popen, set_handler
        for number in HANDLED:
            # Set Python's handler again: it replaces the one that Ray installed in C++.
            signal.signal(number, signal.getsignal(number))


@contextlib.contextmanager
def services_kept_from_ray() -> Iterator[None]:
    """Start a cluster in the block without services that a run does not use: the server of dashboard and jobs (with a
    port of its own, even without dashboard), the autoscaler, and the log monitor. Ray would start each as a Python
    process and wait for it. Ray (2.60) has no option for it.
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


@contextlib.contextmanager
def daemons_killed_at_once() -> Iterator[None]:
    """Let `ray.shutdown` in the block kill the daemons that this process started, and their children.

    Ray (2.60) sends TERM, which is blocked in them (`signals_kept_from_ray`), and waits a second for each daemon before
    it kills it. The raylet's agents would notice its death two seconds later. Children of workers are not killed here:
    the death of a worker ends them, and launchers of sandboxes must remove their directories then.
    """
    kill = Node.kill_all_processes

    def kill_with_children(self: Node, check_alive: bool = True, **options: bool) -> None:
        children = [child for daemon in Daemons.started().processes.values() for child in _children(daemon)]
        kill(self, check_alive=check_alive)
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    Node.kill_all_processes = kill_with_children
    try:
        yield
    finally:
        Node.kill_all_processes = kill


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children())
    except psutil.NoSuchProcess:
        return []


@dataclass
class Daemons:
    """Daemons of the cluster that this process started, by name; none if it joined a cluster."""

    processes: Mapping[str, psutil.Process] = field(default_factory=dict)

    @classmethod
    def started(cls) -> Daemons:
        """Find the daemons among the children of this process."""
        children = {}
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                children[child.name()] = child
        return cls({name: children[name] for name in NAMES if name in children})

    def dead(self) -> str | None:
        """Return the name of a daemon that has ended, or None."""
        return next((name for name, process in self.processes.items() if not is_alive(process)), None)


class Guard:
    """Ends a process that is stuck in Ray because a daemon has died: if the process has not stopped by itself after
    SECONDS_TO_RETURN, another thread calls `give_up` with a message."""

    def __init__(self, give_up: Callable[[str], None]) -> None:
        self._give_up = give_up
        self._daemons = Daemons()
        self._intended, self._ended = threading.Event(), threading.Event()

    def watch(self, daemons: Daemons) -> None:
        """Begin to watch `daemons`, in another thread."""
        self._daemons = daemons
        threading.Thread(target=self._look, name="guard of Ray's daemons", daemon=True).start()

    def let_end(self) -> None:
        """Ignore deaths from now on, because this process ends the daemons."""
        if self._daemons.dead() is None:
            self._intended.set()

    def stop(self) -> None:
        """Stop watching: the process has returned from Ray."""
        self._intended.set()
        self._ended.set()

    def _look(self) -> None:
        while not self._intended.wait(SECONDS_BETWEEN_LOOKS):
            if (name := self._daemons.dead()) is not None:
                if not self._ended.wait(SECONDS_TO_RETURN):
                    self._give_up(f"Ray's {name} died, and with it every process of the run")
                return


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def pid_is_alive(pid: int) -> bool:
    """Return whether a process with this id runs (see `is_alive`)."""
    try:
        return is_alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False
