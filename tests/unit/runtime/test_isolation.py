"""Isolation of a run's ports from other users of the host."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.runtime.isolation import choice, namespace

PROBE = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
client = socket.create_connection(listener.getsockname(), 5)
try:
    socket.create_connection(("192.0.2.1", 9), 5)
    outside = "reached"
except OSError:
    outside = "unreachable"
inside = os.environ['MCORE_RL_NETWORK_NAMESPACE'] == os.readlink('/proc/self/ns/net')
print(os.getuid(), inside, outside, flush=True)
input()
"""


class Restarted(Exception):
    """Raised in place of the restart of this process."""


def log_in(monkeypatch: pytest.MonkeyPatch, users: Sequence[str], *, possible: bool = True) -> None:
    """Let `users` be logged in on a host where namespaces are `possible`; a restart raises Restarted."""

    def restart(path: str, command: Sequence[str]) -> None:
        raise Restarted(command)

    monkeypatch.setattr(choice, "other_users", lambda: list(users))
    monkeypatch.setattr(namespace, "can_enter", lambda: possible)
    monkeypatch.setattr(os, "execv", restart)


def config_of(isolation: str, **cluster: str) -> Config:
    config = Config()
    config.cluster.isolation = isolation
    for key, value in cluster.items():
        setattr(config.cluster, key, value)
    return config


@pytest.mark.parametrize(("isolation", "users"), [("auto", []), ("none", ["alice"])])
def test_isolate_alone_or_disabled_does_nothing(
    isolation: str, users: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(monkeypatch, users, possible=False)
    choice.isolate(config_of(isolation), print)


def test_isolate_with_other_users_restarts_in_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    log_in(monkeypatch, ["alice", "bob"])
    lines: list[str] = []
    with pytest.raises(Restarted) as raised:
        choice.isolate(config_of("auto"), lines.append)
    assert raised.value.args[0][1:3] == ["-m", namespace.__name__]
    assert raised.value.args[0][4:] == sys.orig_argv
    assert "alice, bob are logged in on this host" in lines[0]


@pytest.mark.parametrize(
    ("isolation", "users", "possible", "url", "wanted"),
    [
        ("auto", ["alice"], False, None, "alice is logged in on this host, but this host does not allow"),
        ("auto", ["alice"], True, "http://judge:8000/v1", "cannot reach judge.url=http://judge:8000/v1"),
        ("namespace", [], True, "http://judge:8000/v1", "cannot reach judge.url=http://judge:8000/v1"),
        ("namespace", [], False, None, "this host does not allow a network namespace"),
    ],
)
def test_isolate_where_impossible_is_rejected(
    isolation: str, users: list[str], possible: bool, url: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(monkeypatch, users, possible=possible)
    config = config_of(isolation)
    config.judge.url = url
    with pytest.raises(ConfigError, match=r"set cluster\.isolation=none") as raised:
        choice.isolate(config, print)
    assert wanted in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("trackers", ["tensorboard", "wandb"], r"observe\.trackers=\[wandb\] \(observe\.trackers_offline=true writes"),
        ("prometheus_port", 9400, r"observe\.prometheus_port=9400"),
    ],
)
def test_isolate_with_an_observer_that_needs_a_network_is_rejected(
    key: str, value: object, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(monkeypatch, ["alice"])
    config = config_of("auto")
    setattr(config.observe, key, value)
    with pytest.raises(ConfigError, match=f"cannot reach {wanted}"):
        choice.isolate(config, print)
    config.observe.trackers_offline, config.observe.prometheus_port = True, 0
    with pytest.raises(Restarted):
        choice.isolate(config, print)


def test_isolate_namespace_with_a_joined_cluster_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.address"):
        choice.isolate(config_of("namespace", address="10.0.0.1:6379"), print)


def test_check_remote_host_with_other_users_names_the_host() -> None:
    with pytest.raises(ConfigError, match="a, b, c and 1 more are logged in on n3"):
        choice.check_remote_host("auto", "n3", ["a", "b", "c", "d"])
    choice.check_remote_host("none", "n3", ["a"])
    choice.check_remote_host("auto", "n3", [])


def test_other_users_counts_people_with_processes_or_sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {0: "root", 33: "www-data", 1000: "me", 1001: "alice", 1002: "bob", 65534: "nobody"}

    def account(uid: int) -> pwd.struct_passwd:
        return pwd.struct_passwd((names[uid], "x", uid, uid, "", "/", "/bin/sh"))

    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(pwd, "getpwuid", account)
    monkeypatch.setattr(choice, "_process_owners", lambda: iter([0, 33, 1000, 1001, 65534, 1 << 30]))
    for uid in ("1002", "1000"):
        (tmp_path / uid).touch()
    monkeypatch.setattr(choice, "LOGIN_SESSIONS", tmp_path)
    assert choice.other_users() == ["alice", "bob"]


@pytest.mark.skipif(not namespace.can_enter(), reason="this host does not allow network namespaces")
@pytest.mark.parametrize("uid", [None, 12_345])
def test_namespace_ports_are_out_of_reach_from_outside(uid: int | None) -> None:
    python = "/usr/bin/python3" if uid is not None else sys.executable  # another user may not read this one
    prefix = [] if uid is None else ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all"]
    if uid is not None and (os.geteuid() != 0 or not shutil.which("setpriv") or not Path(python).exists()):
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as directory, socket.socket() as outside:
        outside.bind(("127.0.0.1", 0))  # without listening: no other process can listen on this port
        port = outside.getsockname()[1]
        Path(directory).chmod(0o755)
        program = shutil.copy(namespace.__file__, directory)
        command = [*prefix, python, program, python, python, "-c", PROBE, str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            assert words == [str(os.getuid() if uid is None else uid), "True", "unreachable"]
            with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 5):
                pass
            process.communicate("\n")
        assert process.returncode == 0
