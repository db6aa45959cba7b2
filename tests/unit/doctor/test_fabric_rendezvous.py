"""Place of a node from the options or from SLURM; invalid options are named."""

from __future__ import annotations

import argparse
import socket

import pytest

from mcore_rl.cli import main
from mcore_rl.doctor.command import add_arguments
from mcore_rl.doctor.fabric.rendezvous import Address, expand_hosts, listen, place_of
from mcore_rl.errors import ConfigError


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--node", *words])


STEP = {
    "SLURMD_NODENAME": "n2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_TASKS": "3",
}


def test_single_node_uses_a_free_port() -> None:
    place = place_of(options(), {})
    assert (place.index, place.num_nodes, place.address.host) == (0, 1, "127.0.0.1")
    assert place.listener is not None
    with place.listener as listener:
        assert listener.getsockname() == ("127.0.0.1", place.address.port)


def test_job_step_meets_at_its_first_node() -> None:
    place = place_of(options("--port", "1234"), STEP)
    assert (place.index, place.num_nodes, place.host, place.address) == (1, 3, "n2", Address("n1", 1234))
    assert place.hosts == ("n1", "n2", "n3")
    assert place.listener is None


def test_step_of_one_node_and_batch_script_are_single_nodes() -> None:
    for environment in (STEP | {"SLURM_STEP_NODELIST": "n2", "SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_NODEID": "0"}):
        place = place_of(options(), environment)
        assert place.num_nodes == 1
        assert place.listener is not None
        place.listener.close()


def test_rendezvous_overrides_slurm() -> None:
    place = place_of(options(*"--rendezvous [fd00::1]:99 --nodes 2 --node-rank 1".split()), STEP)
    assert (place.index, place.num_nodes, place.address) == (1, 2, Address("fd00::1", 99))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-3,07],m2", "n1 n2 n3 n07 m2"),
        ("gpu[08-10]-ib", "gpu08-ib gpu09-ib gpu10-ib"),
        ("r[1-2]n[1,3]", "r1n1 r1n3 r2n1 r2n3"),
    ],
)
def test_expand_hosts_expands_brackets(text: str, names: str) -> None:
    assert expand_hosts(text) == names.split()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--node --slots 0", "--slots"),
        ("--node --timeout 0", "--timeout"),
        ("--node --slow-percent 101", "--slow-percent"),
        ("--node --port 0", "--port=0 must be one of 1 to 65535"),
        ("--node --nodes 2", "--nodes belongs to --rendezvous"),
        ("--node --port 1", "--port is for a SLURM job step"),
        ("--node --rendezvous a:1", "--rendezvous needs --nodes N and --node-rank I"),
        ("--node --rendezvous a:1 --nodes 2 --node-rank 2", "--node-rank=2 must be one of 0 to 1"),
        ("--node --rendezvous a --nodes 2 --node-rank 1", "--rendezvous=a must look like HOST:PORT"),
        ("--node --missing", "--missing"),
        ("--slots 2", "--slots belongs to the fabric test: add --node"),
        ("--json", "--json belongs to the fabric test"),
    ],
)
def test_invalid_options_are_named(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_several_tasks_per_node_raise() -> None:
    with pytest.raises(ConfigError, match="--ntasks-per-node=1"):
        place_of(options(), STEP | {"SLURM_STEP_NUM_TASKS": "6"})


def test_occupied_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            listen(Address("127.0.0.1", port))


def test_own_name_on_loopback_listens_on_all_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    with listen(Address("this-node", 0)) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
