"""Ranks that take commands over TCP: those with the key, wherever they were started, and nobody else."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

import pytest

from mcore_rl.engines.hosts import EngineHosts
from mcore_rl.engines.sglang import processes
from mcore_rl.engines.sglang.processes import RankProcesses
from mcore_rl.engines.sglang.settings import RankSettings
from mcore_rl.errors import WorkerDiedError

KEY = b"k" * 32
SETTINGS = RankSettings("model", {}, 0, 4, "", "float32", True, 8, 1, None, 1, False, 1)
RANK = """
import sys
from mcore_rl.engines.sglang.rank import _connect
address, rank, key = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
pipe = _connect(address, key)
pipe.send(rank)
settings = pipe.recv()
pipe.send(("ok", 96))
while True:
    method, arguments = pipe.recv()
    pipe.send(("ok", (settings.rank, settings.init_method, method, *arguments)))
"""
"""Speaks as a rank does, without SGLang."""


def start_rank(rank: int, num_ranks: int, address: str, key: bytes, mark: str = "mark") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", RANK, address, str(rank), key.hex()])


def hangs_up(address: tuple[str, int]) -> None:
    socket.create_connection(address).close()


def has_another_key(address: tuple[str, int]) -> None:
    with pytest.raises(AuthenticationError):
        Client(address, family="AF_INET", authkey=b"another")


def when_it_listens(address: tuple[str, int], call: Callable[[tuple[str, int]], None]) -> None:
    while True:
        try:
            return call(address)
        except ConnectionRefusedError:
            time.sleep(0.01)


@pytest.mark.parametrize("stranger", [hangs_up, has_another_key])
def test_ranks_of_two_hosts_answer_in_their_order_and_strangers_are_sent_away(
    monkeypatch: pytest.MonkeyPatch, stranger: Callable[[tuple[str, int]], None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hosts = EngineHosts(("a", "b"), 0, "127.0.0.1", 7, port, KEY)
    monkeypatch.setattr(processes, "start_rank", start_rank)
    far = [start_rank(rank, 4, f"127.0.0.1:{port}", KEY) for rank in EngineHosts(("a", "b"), 1).ranks(4)]
    thread = threading.Thread(target=when_it_listens, args=(("127.0.0.1", port), stranger))
    thread.start()
    ranks = RankProcesses(SETTINGS, "the engine", 20.0, hosts)
    try:
        thread.join(20)
        assert not thread.is_alive()
        assert ranks.vocab_size == 96
        assert ranks.call("say", 5) == [(rank, "tcp://127.0.0.1:7", "say", 5) for rank in range(4)]
        far[1].kill()
        with pytest.raises(WorkerDiedError, match="the engine: rank 3 ended in `say`"):
            _for_ever(lambda: ranks.call("say", 6))
    finally:
        ranks.end()
        for process in far:
            process.kill()
            process.wait()


def _for_ever(call: Callable[[], Any]) -> None:
    while True:
        call()
