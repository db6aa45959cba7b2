"""Main function of a process in test_link_versions.py: python -m tests.contract.link_member PORT MEMBER.

Imports nothing that one of the two environments lacks.
"""

from __future__ import annotations

import json
import sys

import torch

from mcore_rl.weights.transports.arrival import Rendezvous
from mcore_rl.weights.transports.link import Link, MessageKind, MessageTag

NUM_WEIGHTS = 1 << 18
TAG = MessageTag(MessageKind.WEIGHTS, buffer=3, sync_round=5)
DIGESTS = MessageTag(MessageKind.DIGESTS, buffer=3, sync_round=5)


def weights_of(member: int) -> torch.Tensor:
    """Return the weights that a member sends."""
    return (torch.arange(NUM_WEIGHTS) * (member + 1)).to(torch.bfloat16)


def main(port: int, member: int) -> None:
    """Exchange weights and a number with the other member; prints the results as JSON."""
    peer = 1 - member
    meeting = Rendezvous("127.0.0.1", port, generation=1)
    link = Link.connect(meeting, member, 2, "127.0.0.1", timeout_seconds=60, name=lambda each: f"member {each}")
    link.handshake([peer])
    number, weights = torch.zeros(1, dtype=torch.int64), torch.zeros(NUM_WEIGHTS, dtype=torch.bfloat16)
    pending = [link.receive(number, peer, DIGESTS), link.receive(weights.view(torch.uint8), peer, TAG)]
    sent = [link.send(torch.tensor([100 + member]), peer, DIGESTS)]
    sent.append(link.send(weights_of(member).view(torch.uint8), peer, TAG))
    for each in (*pending, *sent):
        each.wait()
    equal = torch.equal(weights, weights_of(peer))
    print(json.dumps({"torch": torch.__version__, "number": int(number), "equal": equal}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
