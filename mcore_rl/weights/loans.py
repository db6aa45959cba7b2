"""Messages of a round without memory of their own: their slices are packed for another message already.

A trainer rank often sends the same slices to an engine rank on its host, through a staging buffer, and to others
elsewhere. It packs them once, into the staging buffer, and sends the others from there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from mcore_rl.weights.slices.messages import Message, Slice


class Loan(NamedTuple):
    """Memory of a message: a part of the memory of the message to staging buffer `lender`, from byte `offset` on."""

    lender: int
    offset: int


def find_loans(messages: Sequence[Message], borrowers: Collection[int]) -> dict[int, Loan]:
    """Find the messages to `borrowers` whose slices follow each other in another one of these messages, by receiver.

    messages: of one sender and one round. A message that borrows memory lends none.
    """
    places: dict[Slice, tuple[Message, int]] = {}
    loans = {}
    # A message cannot be a part of a shorter one.
    for message in sorted(messages, key=lambda each: (each.receiver in borrowers, -len(each.slices), each.receiver)):
        slices = [replace(each, offset=0) for each in message.slices]
        if message.receiver in borrowers and slices[0] in places:
            lender, first = places[slices[0]]
            part = lender.slices[first : first + len(slices)]
            if [replace(each, offset=0) for each in part] == slices:
                loans[message.receiver] = Loan(lender.receiver, part[0].offset)
                continue
        for index, each in enumerate(slices):
            places.setdefault(each, (message, index))
    return loans
