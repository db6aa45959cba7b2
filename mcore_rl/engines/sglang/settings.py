"""Settings and requests that are sent to the ranks in SGLang's environment."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection


@dataclass(frozen=True)
class RankSettings:
    """Settings of one rank.

    overrides: values that replace fields of the model's config.json.
    init_method: URL at which the ranks create their process group.
    kv_cache_bytes: size of this rank's KV cache.
    """

    model: str
    overrides: dict[str, object]
    rank: int
    num_ranks: int
    init_method: str
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
    """Request for a rank. Requests share cached prefixes only if their `salt` is equal."""

    engine_id: str
    token_ids: list[int]
    seed: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    salt: str


def disable_nagle(pipe: Connection) -> None:
    """Set TCP_NODELAY: otherwise TCP delays the second half of a long message until the first is acknowledged."""
    # A duplicate: the end of the block closes the socket object, not the pipe.
    with socket.socket(fileno=os.dup(pipe.fileno())) as duplicate:
        duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
