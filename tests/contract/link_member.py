"""Main function of a process in test_link_versions.py: python -m tests.contract.link_member PORT MEMBER.

Imports nothing that one of the two environments lacks.
"""

from __future__ import annotations

import json
import sys

import torch

from mcore_rl.weights.transports.link import Link, MessageKind, MessageTag, Rendezvous

NUM_WEIGHTS = 1 << 18
TAG = MessageTag(MessageKind.WEIGHTS, buffer=3, sync_round=5)
READY = MessageTag(MessageKind.READY, buffer=3, sync_round=5)


def weights_of(member: int) -> torch.Tensor:
    """Return the weights that a member sends."""
    return (torch.arange(NUM_WEIGHTS) * (member + 1)).to(torch.bfloat16)


def main(port: int, member: int) -> None:
    """Exchange weights and a control message with the other member; prints the results as JSON."""
    peer = 1 - member
    meeting = Rendezvous("127.0.0.1", port, generation=1)
    link = Link.connect(meeting, member, 2, "127.0.0.1", timeout_seconds=60, name=lambda each: f"member {each}")
    link.handshake([peer])
    number, weights = torch.zeros(1, dtype=torch.int64), torch.zeros(NUM_WEIGHTS, dtype=torch.bfloat16)
    pending = [link.receive(number, peer, READY), link.receive(weights.view(torch.uint8), peer, TAG)]
    link.send_control(100 + member, peer, READY)
    sent = link.send(weights_of(member).view(torch.uint8), peer, TAG)
    for each in (*pending, sent):
        each.wait()
    link.flush()
    equal = torch.equal(weights, weights_of(peer))
    print(json.dumps({"torch": torch.__version__, "number": int(number), "equal": equal}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
