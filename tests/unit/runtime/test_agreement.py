"""Comparison of the hosts of a run; addresses and free ports."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import Config
from mcore_rl.config.rules.engine_support import SGLANG_PYTHON, SGLANG_VERSION
from mcore_rl.errors import ConfigError
from mcore_rl.runtime import addresses
from mcore_rl.runtime.addresses import free_port, meet_at, missing_interface
from mcore_rl.runtime.agreement import HostFacts, check_hosts, digest, host_facts, named_paths
from tests.environments import make_environment


@pytest.fixture
def config(tmp_path: Path) -> Config:
    made = Config()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "reward.py").write_text("def grade(): ...")
    (tmp_path / "run").mkdir()
    made.run.dir, made.model.hf_path = str(tmp_path / "run"), str(tmp_path / "model")
    made.reward.function = f"{tmp_path / 'reward.py'}:grade"
    made.data.train = [str(tmp_path / "train.jsonl")]  # exists on the driver's host only
    return made


def other(
    config: Config, mark: Path, change: Callable[[HostFacts], dict[str, Any]] = lambda here: {}
) -> list[HostFacts]:
    """Return the facts of another host that equals this one except for `change`."""
    here = host_facts(named_paths(config), mark)
    return [replace(here, **({"name": "node7"} | change(here)))]


def test_check_hosts_equal_hosts_pass_and_leave_no_file(config: Config) -> None:
    check_hosts(config.run.dir, named_paths(config), partial(other, config), uses_sglang=True)
    assert list(Path(config.run.dir).iterdir()) == []
    assert named_paths(config).keys() == {"model.hf_path", "reward.function"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda here: {"sees_mark": False}, r"run\.dir=.* node7 does not see .* storage that all hosts share"),
        (lambda here: {"versions": here.versions | {"torch": "1.0"}}, r"node7 has torch 1\.0, and .* has \d"),
        (
            lambda here: {"versions": here.versions | {"nvidia-nccl-cu13": "1.0"}},
            r"node7 has nvidia-nccl-cu13 1\.0, and",
        ),
        (lambda here: {"missing_interface": "GLOO_SOCKET_IFNAME=ib7: node7 has no such"}, "ib7: node7 has no such"),
        (lambda here: {"seconds": here.seconds - 40}, r"clocks of .* and node7 are \d\d s apart"),
        (lambda here: {"seconds": here.seconds + 40}, r"clocks of .* and node7 are \d\d s apart"),
        (
            lambda here: {"files": here.files | {"model.hf_path": "nothing"}},
            r"model\.hf_path=.* does not exist on node7",
        ),
        (lambda here: {"files": here.files | {"reward.function": "x"}}, r"reward\.function=.* differs between node7"),
    ],
)
def test_check_hosts_difference_is_named(
    config: Config, changes: Callable[[HostFacts], dict[str, object]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_hosts(config.run.dir, named_paths(config), partial(other, config, change=changes), uses_sglang=True)
    assert list(Path(config.run.dir).iterdir()) == []


@pytest.mark.parametrize(
    ("there", "uses_sglang", "rejected"),
    [
        ({"sglang": SGLANG_VERSION, "NCCL in SGLang's environment": "2.30.7"}, True, False),
        ({"sglang": SGLANG_VERSION, "NCCL in SGLang's environment": "2.29.7"}, True, True),
        ({"sglang": SGLANG_VERSION, "NCCL in SGLang's environment": "2.29.7"}, False, False),
        ({}, True, False),  # a host of trainer ranks
    ],
)
def test_check_hosts_sglang_of_engine_hosts_is_compared(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: dict[str, str],
    uses_sglang: bool,
    rejected: bool,
) -> None:
    python = make_environment(tmp_path / "sglang", {"sglang": SGLANG_VERSION, "nvidia-nccl-cu13": "2.30.7"})
    monkeypatch.setenv(SGLANG_PYTHON, str(python))
    ask = partial(other, config, change=lambda here: {"sglang": there})
    message = r"node7 has NCCL in SGLang's environment 2\.29\.7, and .* has 2\.30\.7: install the same"
    with pytest.raises(ConfigError, match=message) if rejected else nullcontext():
        check_hosts(config.run.dir, named_paths(config), ask, uses_sglang=uses_sglang)


def test_digest_depends_on_names_sizes_and_small_contents(tmp_path: Path) -> None:
    first = tmp_path / "a"
    first.mkdir()
    (first / "config.json").write_text('{"a": 1}')
    (first / "weights").write_bytes(bytes(2 << 20))
    copy = tmp_path / "b"
    shutil.copytree(first, copy)
    assert digest(first) == digest(copy)
    (copy / "config.json").write_text('{"a": 2}')
    assert digest(first) != digest(copy)
    shutil.copy(first / "config.json", copy / "config.json")
    (copy / "weights").write_bytes(bytes((2 << 20) + 1))
    assert digest(first) != digest(copy)
    assert digest(tmp_path / "nowhere") == "nothing"


def test_missing_interface_names_existing_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert missing_interface() == ""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    assert re.search(r"GLOO_SOCKET_IFNAME=ib7: .* has no such interface, only .*lo.* unset it", missing_interface())


class _Taken(socket.socket):
    """Fake bind that fails for all ports except `free`."""

    free: tuple[int, ...] = ()

    def bind(self, address: object) -> None:
        if address[1] not in self.free:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        super().bind(address)


def test_free_port_is_below_the_ephemeral_range() -> None:
    first = int(addresses.EPHEMERAL.read_text().split()[0])
    assert first - addresses.CANDIDATES <= free_port() < first


def test_free_port_without_free_candidates_asks_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", _Taken)
    monkeypatch.setattr(_Taken, "free", (0,))
    assert free_port() >= int(addresses.EPHEMERAL.read_text().split()[0])


def test_free_port_without_any_names_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", _Taken)
    with pytest.raises(ConfigError, match=rf"{socket.gethostname()}: no port is free .* end processes that hold ports"):
        free_port()


def test_meet_at_chooses_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"):
        monkeypatch.setenv(name, "")  # registers the variable, so that it is restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "the user's")
    meet_at("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "the user's"
    assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"
