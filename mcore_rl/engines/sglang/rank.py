"""A rank of an SGLang engine: `python -m mcore_rl.engines.sglang.rank SOCKET|HOST:PORT RANK`, started by
engines.sglang.processes with the interpreter of SGLang's environment. It answers (method, arguments) with ("ok",
result), ("refused", (type, text)) of an error of ours, or ("error", text)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection

from mcore_rl.engines.sglang.settings import RankSettings, send_at_once
from mcore_rl.errors import McoreRLError

KEY_VARIABLE = "MCORE_RL_ENGINE_KEY"
_PR_SET_PDEATHSIG = 1
_TRACE_LINES = 12


def main(address: str, rank: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # whatever becomes of the parent
    key = bytes.fromhex(os.environ.pop(KEY_VARIABLE))
    with _meet(address, key) as pipe:
        pipe.send(rank)
        settings: RankSettings = pipe.recv()
        try:
            from mcore_rl.engines.sglang import cpu

            cpu.prepare()
            import sglang.srt.managers.scheduler  # noqa: F401  (all that `mend` changes)

            cpu.mend()
            from mcore_rl.engines.sglang.scheduler import SteppedScheduler

            scheduler = SteppedScheduler(settings)
        except Exception as error:
            pipe.send(("error", _told(error)))
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
                pipe.send(("error", _told(error)))


def _meet(address: str, key: bytes) -> Connection:
    """Where the engine is on another host it may not have come yet; whoever waits for the run has a deadline, and this
    process ends with its parent."""
    if address.startswith("/"):
        return Client(address, family="AF_UNIX", authkey=key)
    host, _, port = address.rpartition(":")
    while True:
        try:
            pipe = Client((host, int(port)), family="AF_INET", authkey=key)
        except ConnectionRefusedError:
            time.sleep(0.5)
            continue
        send_at_once(pipe)
        return pipe


def _told(error: Exception) -> str:
    return "\n".join("".join(traceback.format_exception(error)).splitlines()[-_TRACE_LINES:])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    os._exit(0)  # threads of SGLang would keep it
