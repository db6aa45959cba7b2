"""Members of a transfer group arrive before they connect: missing ones are named, and a loss ends the wait."""

from __future__ import annotations

import threading
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.connection import Connection, TrainerSetup, connect_engine_rank
from mcore_rl.weights.transports.arrival import MAX_NAMED, Rendezvous, announce_loss, await_members
from tests.unit.weights.test_transfer import CASES
from tests.unit.weights.transfer import at_once, store, sync_plan


def arrive(port: int, member: int, num_members: int, timeout_seconds: float) -> None:
    opened = Rendezvous("127.0.0.1", port, 1).open(timeout_seconds)
    await_members(opened, member, num_members, timeout_seconds=timeout_seconds, name="member {}".format)


def test_await_members_returns_after_all_have_arrived() -> None:
    server = store()
    at_once([partial(arrive, server.port, member, 3, 60) for member in range(3)])


@pytest.mark.parametrize("num_members", [2, 4, MAX_NAMED + 3])
def test_await_members_names_those_that_are_missing(num_members: int) -> None:
    server = store()
    with pytest.raises(PeerLostError, match=r"within 0\.2 s from member 1") as failed:
        arrive(server.port, 0, num_members, 0.2)
    named = ", ".join(f"member {each}" for each in range(1, min(num_members, MAX_NAMED + 1)))
    assert str(failed.value).endswith(named + (" and 2 more" if num_members > MAX_NAMED + 1 else ""))


def test_await_members_returns_if_the_last_arrives_at_the_timeout() -> None:
    class Late(dist.HashStore):
        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            self.set("arrived/1", "")
            raise RuntimeError("wait timeout")

    await_members(Late(), 0, 2, timeout_seconds=0.2, name="member {}".format)


def test_connect_names_the_role_rank_and_host_of_a_missing_member() -> None:
    plan, server = sync_plan(*CASES["all kinds"]), store()
    connection = Connection(plan, Rendezvous("127.0.0.1", server.port, 1), {}, 0.2)
    with pytest.raises(
        PeerLostError, match=r"7 processes .* from trainer rank 0 on A, .*trainer rank 3 on C and 2 more"
    ):
        connect_engine_rank(connection, 1)


def test_announced_loss_ends_the_wait_of_gloo_members_too() -> None:
    """An engine that dies before it connects would otherwise hold all trainer ranks until their timeout."""
    plan, server = sync_plan(*CASES["engine elsewhere"]), store()
    setups = [TrainerSetup(plan, rank) for rank in range(2)]
    connection = Connection(plan, Rendezvous("127.0.0.1", server.port, 1), {}, 300)
    threading.Timer(0.3, announce_loss, (server, 1, "rollout engine 0 died")).start()
    for error in at_once([partial(error_of, setup, connection) for setup in setups]):
        assert "rollout engine 0 died" in error


def error_of(setup: TrainerSetup, connection: Connection) -> str:
    with pytest.raises(PeerLostError) as failed:
        setup.connect(connection)
    return str(failed.value)
