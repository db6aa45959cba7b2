"""NCCL process group of the GPUs of a weight sync: construction, waits for its work, and its end after a loss."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.transports.arrival import Rendezvous, announce, raise_announced

T = TypeVar("T")

ENVIRONMENT = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Variables of torch (2.13) while it constructs the group, which is when it reads them. They leave out the watchdog
thread. The watchdog ends the whole process when a collective fails or times out, and that may happen before `wait`
raises the error. Without error handling alone, the watchdog still makes the monitor thread of the process's first group
(Megatron's or the engine's) abort the process eight minutes later."""
TIMEOUT_FACTOR = 10
"""Timeout of the group, in multiples of the timeout of a wait: only the wait decides that a peer is lost."""
MAX_CTAS = 4
"""Maximum CUDA thread blocks, and therefore channels, of the group. NCCL allocates buffers by peer and channel, and
four channels carry more than one network card."""
SECONDS_BETWEEN_CHECKS = 1.0
"""Time between two looks at the store during a wait."""
_POLL_SECONDS = 0.001


def nccl_version() -> str:
    """Return the version of the NCCL library in this process, such as 2.29.7; "" without CUDA."""
    if not torch.cuda.is_available():
        return ""
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2", os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:  # linked into torch
        return ".".join(map(str, torch.cuda.nccl.version()))
    # torch.cuda.nccl.version() is the version that torch was compiled with. Another library may have been installed.
    library.ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"


class NcclGroup:
    """NCCL process group on `device`, as rank `rank` of `size`.

    The group cannot be used after the loss of a member: all members create a new one, with a new rendezvous.

    Collective: all members, after all have arrived (arrival.await_members).
    Raises: PeerLostError if a member is lost.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, size: int, device: torch.device, *, timeout_seconds: float
    ) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        self._device = device
        self._timeout = timeout
        self._ended = False
        try:
            self._store = rendezvous.open(timeout_seconds)
            store = dist.PrefixStore("nccl", rendezvous.open(timeout_seconds))
            self._group = process_group(store, rank, size, device, timeout)
            self._create_communicator()
        except RuntimeError as error:
            raise PeerLostError(f"the {size} GPUs of a sync did not connect through NCCL: {error}") from None

    def send(self, memory: torch.Tensor, rank: int) -> None:
        self._group.send([memory], rank, 0)

    def receive(self, memory: torch.Tensor, rank: int) -> None:
        self._group.recv([memory], rank, 0)

    def launch(self, operations: Sequence[Callable[[], None]]) -> dist.Work:
        """Call `operations`, which send and receive, and start them as one NCCL group."""
        self._require_alive()
        self._group._start_coalescing(self._device)
        for operation in operations:
            operation()
        return self._group._end_coalescing(self._device)

    def launch_first(self, operations: Sequence[Callable[[], None]]) -> dist.Work:
        """Implement `launch` for the first messages between two members, at which NCCL connects them.

        Raises: PeerLostError if a member announced a loss; RuntimeError if NCCL fails or the time is over.
        """
        return self._bounded(partial(self.launch, operations))

    def wait(self, work: dist.Work, timeout_seconds: float) -> None:
        """Block until `work` is complete.

        Raises: PeerLostError if a member announced a loss; RuntimeError if NCCL fails or the time is over.
        """
        start = checked = time.monotonic()
        # Work.wait(timeout) does the same, but it does not look at the store.
        while not self._ended and not work.is_completed():
            now = time.monotonic()
            if now - start > timeout_seconds:
                raise RuntimeError(f"no answer through NCCL in {timeout_seconds:g} s")
            if now - checked > SECONDS_BETWEEN_CHECKS:
                checked = now
                raise_announced(self._store)
            time.sleep(_POLL_SECONDS)
        self._require_alive()
        # Raises errors of NCCL, and makes the current stream wait for NCCL's.
        work.wait(timedelta(seconds=timeout_seconds))

    def abandon(self, reason: str) -> None:
        """Announce a loss to all members and end the group. Further calls do nothing."""
        # The store is gone if the driver has died, and the loss of the peer is the error to report.
        with suppress(RuntimeError):
            announce(self._store, reason)
        self.close()

    def close(self) -> None:
        """End the group and its kernels, without its other members. Further calls do nothing.

        A kernel that waits for a lost peer would occupy the GPU forever, and every synchronization would hang.
        """
        if not self._ended:
            self._ended = True
            self._abort()

    def _abort(self) -> None:
        with suppress(RuntimeError):  # NCCL did not end the communicator in time
            self._group.abort()

    def _create_communicator(self) -> None:
        # The first operation of a group creates its communicator, and all members must take part in it.
        def create() -> None:
            self._group.allreduce([torch.zeros(1, device=self._device)]).wait(self._timeout)

        try:
            self._bounded(create)
        except RuntimeError:
            self.close()
            raise

    def _bounded(self, call: Callable[[], T]) -> T:
        """Make a call in which NCCL connects members, and return its result. NCCL would wait for a lost member without
        a timeout, inside of the call, so another thread makes it and is left behind then.

        Raises: PeerLostError if a member announced a loss; RuntimeError if NCCL fails or the time is over.
        """
        outcome, deadline = Future[T](), time.monotonic() + self._timeout.total_seconds()
        here = _same_stream(self._device)

        def run() -> None:
            try:
                with here:
                    outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=run, name="connect GPUs", daemon=True).start()
        try:
            while not wait([outcome], min(SECONDS_BETWEEN_CHECKS, self._timeout.total_seconds())).done:
                raise_announced(self._store)
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no connection through NCCL in {self._timeout.total_seconds():g} s")
        except BaseException:
            self._ended = True
            # Also in a thread: torch may wait for the other one before it ends the communicator.
            threading.Thread(target=self._abort, name="end GPU connections", daemon=True).start()
            raise
        return outcome.result()

    def _require_alive(self) -> None:
        if self._ended:
            raise PeerLostError("this NCCL group has ended, and its members must connect again")


def process_group(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Construct a process group on NCCL that leaves the handling of errors to its caller. `timeout`: of a wait."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT_FACTOR * timeout
    options.config.min_ctas, options.config.max_ctas = 1, MAX_CTAS
    with _environment(ENVIRONMENT):
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
    return group


def _same_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which another thread uses the current stream of this thread, which is a thread's own."""
    return torch.cuda.stream(torch.cuda.current_stream(device)) if device.type == "cuda" else nullcontext()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
