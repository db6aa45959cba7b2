"""Process of an SGLang rank: `python -m mcore_rl.engines.sglang.rank SOCKET|HOST:PORT RANK PARENT_PID`.

engines.sglang.processes starts it with the interpreter of SGLang's environment. It receives (method, arguments) and
replies as served.answer does.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any

from mcore_rl.engines.sglang.settings import RankSettings, disable_nagle
from mcore_rl.errors import McoreRLError
from mcore_rl.parent_death import die_with
from mcore_rl.processes import served
from mcore_rl.processes.large_imports import first_import
from mcore_rl.processes.stacks import write_child_stacks

if TYPE_CHECKING:
    from mcore_rl.engines.sglang.devices.cuda import Gpu
    from mcore_rl.engines.sglang.devices.interface import Device
    from mcore_rl.engines.sglang.scheduler import SteppedScheduler

KEY_VARIABLE = "MCORE_RL_ENGINE_KEY"
MEASURE, START = "measure", "start"


class Rank:
    """Handles the engine's calls. MEASURE returns the memory of the rank's GPU, START creates the scheduler; other
    calls name a method of the scheduler."""

    def __init__(self) -> None:
        self._scheduler: SteppedScheduler | None = None

    def call(self, call: tuple[str, tuple[Any, ...]]) -> object:
        try:
            return self._call(*call)
        except McoreRLError:
            raise
        except Exception:
            traceback.print_exc()  # the engine receives only its end
            raise

    def _call(self, method: str, arguments: tuple[Any, ...]) -> object:
        if method == MEASURE:
            return _gpu(*arguments).measure()
        if method == START:
            self._scheduler = _scheduler(*arguments)
            return self._scheduler.vocab_size
        assert self._scheduler is not None
        with self._scheduler.stream():
            return getattr(self._scheduler, method)(*arguments)


def main(address: str, rank: int, parent: int) -> None:
    die_with(parent)
    write_child_stacks()
    with _connect(address, bytes.fromhex(os.environ.pop(KEY_VARIABLE))) as connection:
        connection.send(rank)
        with contextlib.suppress(EOFError):
            served.serve_calls(connection, Rank().call)


def _scheduler(settings: RankSettings) -> SteppedScheduler:
    if settings.device == "cuda":
        device: Device = _gpu(settings)
    else:
        from mcore_rl.engines.sglang.devices.cpu import Cpu

        device = Cpu(settings)
    with first_import("sglang"):
        device.import_sglang()
    from mcore_rl.engines.sglang.scheduler import SteppedScheduler

    scheduler = SteppedScheduler(settings, device)
    device.settle()
    return scheduler


def _gpu(settings: RankSettings) -> Gpu:
    from mcore_rl.engines.sglang.devices.cuda import Gpu

    return Gpu(settings)


def _connect(address: str, key: bytes) -> Connection:
    """Connect to the engine. Retries forever if it is on another host, where it may start later than this rank.

    No deadline is needed here: the caller that starts the engine has one, and this process dies with its parent.
    """
    if address.startswith("/"):
        return Client(address, family="AF_UNIX", authkey=key)
    host, _, port = address.rpartition(":")
    while True:
        try:
            connection = Client((host, int(port)), family="AF_INET", authkey=key)
        except ConnectionRefusedError:
            time.sleep(0.5)
            continue
        disable_nagle(connection)
        return connection


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)  # SGLang's threads would keep the process alive
