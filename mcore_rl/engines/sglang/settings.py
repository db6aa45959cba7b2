"""Settings and requests that are sent to the ranks in SGLang's environment."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection

from mcore_rl.types import PromptImages


@dataclass(frozen=True)
class RankSettings:
    """Settings of one rank.

    server_arguments: fields of SGLang's ServerArgs.
    device: cpu or cuda.
    float32_router: model.float32_router.
    kv_cache_bytes: size of this rank's KV cache on CPU. On GPUs, the server arguments determine it.
    num_hosts: hosts of the engine, with equally many ranks.
    init_method: URL at which the ranks create their process group.
    keep_sets: record the sets that tokens are sampled from.
    """

    server_arguments: dict[str, object]
    num_ranks: int
    kv_cache_bytes: int
    device: str = "cpu"
    num_hosts: int = 1
    rank: int = 0
    init_method: str = ""
    keep_sets: bool = False
    float32_router: bool = False

    @property
    def local_rank(self) -> int:
        """Position among the ranks of this host, which is also the number of the rank's GPU among the visible ones."""
        return self.rank % (self.num_ranks // self.num_hosts)


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a rank's GPU before SGLang starts, in bytes. The CUDA context of the rank exists already."""

    free: int
    total: int


@dataclass(frozen=True)
class NewRequest:
    """Request for a rank. Requests share cached prefixes only if their `salt` is equal.

    sampling: fields of SGLang's SamplingParams. keep_sets: record the sets of its tokens. images: of the prompt and of
    the answers of tools in it.
    """

    engine_id: str
    token_ids: list[int]
    sampling: dict[str, object]
    salt: str
    keep_sets: bool = False
    images: PromptImages | None = None


def disable_nagle(pipe: Connection) -> None:
    """Set TCP_NODELAY: otherwise TCP delays the second half of a long message until the first is acknowledged."""
    # A duplicate: the end of the block closes the socket object, not the pipe.
    with socket.socket(fileno=os.dup(pipe.fileno())) as duplicate:
        duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
