"""Process of an SGLang rank: `python -m mcore_rl.engines.sglang.rank SOCKET|HOST:PORT RANK`.

engines.sglang.processes starts it with the interpreter of SGLang's environment. It receives (method, arguments) and
replies ("ok", result), ("refused", (type, text)) for a McoreRLError, or ("error", text) for any other exception.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection

from mcore_rl.engines.sglang.settings import RankSettings, disable_nagle
from mcore_rl.errors import McoreRLError

KEY_VARIABLE = "MCORE_RL_ENGINE_KEY"
_PR_SET_PDEATHSIG = 1
_TRACE_LINES = 12


def main(address: str, rank: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # die with the parent, however it ends
    key = bytes.fromhex(os.environ.pop(KEY_VARIABLE))
    with _connect(address, key) as pipe:
        pipe.send(rank)
        settings: RankSettings = pipe.recv()
        try:
            from mcore_rl.engines.sglang import cpu

            cpu.prepare()
            import sglang.srt.managers.scheduler  # noqa: F401  (the modules that `patch` changes)

            cpu.patch()
            from mcore_rl.engines.sglang.scheduler import SteppedScheduler

            scheduler = SteppedScheduler(settings)
        except Exception as error:
            pipe.send(("error", _traceback_text(error)))
            return
        pipe.send(("ok", scheduler.vocab_size))
        while True:
            try:
                method, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send(("ok", getattr(scheduler, method)(*arguments)))
            except McoreRLError as error:
                pipe.send(("refused", (type(error), str(error))))
            except Exception as error:
                pipe.send(("error", _traceback_text(error)))


def _connect(address: str, key: bytes) -> Connection:
    """Connect to the engine. Retries forever if it is on another host, where it may start later than this rank.

    No deadline is needed here: the caller that starts the engine has one, and this process dies with its parent.
    """
    if address.startswith("/"):
        return Client(address, family="AF_UNIX", authkey=key)
    host, _, port = address.rpartition(":")
    while True:
        try:
            pipe = Client((host, int(port)), family="AF_INET", authkey=key)
        except ConnectionRefusedError:
            time.sleep(0.5)
            continue
        disable_nagle(pipe)
        return pipe


def _traceback_text(error: Exception) -> str:
    return "\n".join("".join(traceback.format_exception(error)).splitlines()[-_TRACE_LINES:])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    os._exit(0)  # SGLang's threads would keep the process alive
