"""Messages of two links in one process."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch

from mcore_rl.errors import PeerLostError
from mcore_rl.weights.transports.arrival import Rendezvous
from mcore_rl.weights.transports.link import Link, MessageKind, MessageTag, open_store
from tests.unit.weights.transfer import at_once

TAG = MessageTag(MessageKind.WEIGHTS, 0, 0)
ELEMENTS = 8 << 20
"""32 MiB, more than the buffers of a socket: the send ends only if the other side reads."""


@pytest.fixture
def links() -> list[Link]:
    """Two connected links, of members 0 and 1."""
    store = open_store("127.0.0.1")
    rendezvous = Rendezvous("127.0.0.1", store.port, 0)
    connect = partial(Link.connect, rendezvous, timeout_seconds=20, name=str)
    found: list[Link] = at_once([partial(connect, member, 2, "127.0.0.1") for member in range(2)])
    at_once([partial(link.handshake, [1 - member]) for member, link in enumerate(found)])
    return found


def test_receive_that_was_dropped_is_completed(links: list[Link]) -> None:
    """Otherwise the message stays in the socket, and gloo's thread uses a whole core until the process ends."""
    first, second = links
    memory = torch.zeros(ELEMENTS)
    first.receive(memory, 1, TAG)  # not waited for, as after an error
    gc.collect()
    second.send(torch.ones(ELEMENTS), 0, TAG).wait()
    first.send(torch.ones(1), 1, TAG)  # after the receive, which has therefore read everything
    second.receive(torch.zeros(1), 0, TAG).wait()


def test_close_with_a_dropped_receive_ends_the_waits_of_the_peer(links: list[Link]) -> None:
    first, second = links
    first.receive(torch.zeros(ELEMENTS), 1, TAG)
    first.close()
    with pytest.raises(PeerLostError, match=r"^0: "):
        second.receive(torch.zeros(1), 0, TAG).wait()
