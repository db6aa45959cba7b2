"""What a rank is told when it starts, and what it says of a step: the values that go between the two environments."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class RankSettings:
    """`overrides`: fields of config.json with other values than `model` has; the ranks meet at the
    url `meeting`. Units: kv_cache_bytes of this rank."""

    model: str
    overrides: dict[str, Any]
    rank: int
    num_ranks: int
    meeting: str
    dtype: str
    load_weights: bool
    context_tokens: int
    max_requests: int
    max_batched_tokens: int | None
    kv_cache_bytes: int
    captures_routing: bool
    seed: int


@dataclass(frozen=True)
class NewRequest:
    """A request as a rank takes it. `salt`: prefixes are shared by requests with the same one only."""

    engine_id: str
    token_ids: list[int]
    seed: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    salt: str


@dataclass(frozen=True)
class Progress:
    """What a step added to a request. `finish_reason` as Completion's, None while it goes on."""

    engine_id: str
    token_ids: list[int]
    logp: list[float]
    finish_reason: str | None


def send_at_once(pipe: Connection) -> None:
    """Over TCP, which else keeps the second half of a long message until the first has been acknowledged."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as duplicate:
        duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
