"""Processes of SGLang's ranks: authentication, order of answers, errors. SGLang itself is not installed here."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import psutil
import pytest

from mcore_rl.engines.settings import EngineHosts
from mcore_rl.engines.sglang import processes
from mcore_rl.engines.sglang.processes import RankProcesses
from mcore_rl.engines.sglang.settings import RankSettings
from mcore_rl.errors import ConfigError, WorkerDiedError
from mcore_rl.processes.child import Child, kill_all

KEY = b"k" * 32
SETTINGS = RankSettings({}, num_ranks=4, kv_cache_bytes=1)
RANK = """
import sys
from mcore_rl.engines.sglang.rank import _connect
from mcore_rl.processes import served
address, rank, key = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
started = []

def call(message):
    method, arguments = message
    if method == "start":
        started.append(arguments[0])
        return 96
    return (started[0].rank, started[0].init_method, method, *arguments)

connection = _connect(address, key)
connection.send(rank)
served.serve_calls(connection, call)
"""
"""A rank without SGLang."""


def start_rank(rank: int, num_ranks: int, address: str, key: bytes, device: str = "cpu") -> Child:
    return Child([sys.executable, "-c", RANK, address, str(rank), key.hex()], os.environ)


def close_at_once(address: tuple[str, int]) -> None:
    socket.create_connection(address).close()


def use_another_key(address: tuple[str, int]) -> None:
    with pytest.raises(AuthenticationError):
        Client(address, family="AF_INET", authkey=b"another")


def retry_until_listening(address: tuple[str, int], call: Callable[[tuple[str, int]], None]) -> None:
    while True:
        try:
            return call(address)
        except ConnectionRefusedError:
            time.sleep(0.01)


@pytest.mark.parametrize("stranger", [close_at_once, use_another_key])
def test_ranks_of_two_hosts_answer_in_order_and_reject_strangers(
    monkeypatch: pytest.MonkeyPatch, stranger: Callable[[tuple[str, int]], None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hosts = EngineHosts(("a", "b"), 0, "127.0.0.1", 7, port, KEY)
    monkeypatch.setattr(processes, "start_rank", start_rank)
    far = [start_rank(rank, 4, f"127.0.0.1:{port}", KEY) for rank in EngineHosts(("a", "b"), 1).ranks(4)]
    thread = threading.Thread(target=retry_until_listening, args=(("127.0.0.1", port), stranger))
    thread.start()
    ranks = RankProcesses(SETTINGS, "the engine", 20.0, hosts)
    try:
        thread.join(20)
        assert not thread.is_alive()
        assert ranks.vocab_size == 96
        assert ranks.call("say", 5) == [(rank, "tcp://127.0.0.1:7", "say", 5) for rank in range(4)]
        far[1].kill()
        with pytest.raises(WorkerDiedError, match="the engine: rank 3 ended in `say`"):
            _repeat(lambda: ranks.call("say", 6))
    finally:
        ranks.end()
        kill_all(far)


def test_failed_start_raises_config_error_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """This environment has no SGLang, so the real rank module fails in its first call."""
    monkeypatch.setenv("MCORE_RL_SGLANG_PYTHON", sys.executable)
    children = set(psutil.Process().children(recursive=True))
    with pytest.raises(ConfigError, match=r"^SGLang cannot run this: ModuleNotFoundError: No module named 'sglang"):
        RankProcesses(replace(SETTINGS, num_ranks=2), "the engine", 60.0)
    assert set(psutil.Process().children(recursive=True)) <= children


def _repeat(call: Callable[[], object]) -> None:
    while True:
        call()
