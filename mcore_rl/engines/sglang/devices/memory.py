"""Memory that a rank releases during sleep. Its parts are "weights" and "kv_cache"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from mcore_rl.engines.kept_slices import storage_key
from mcore_rl.errors import ConfigError

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from mcore_rl.engines.rank_memory import RankMemory

WEIGHTS, KV_CACHE = "weights", "kv_cache"
SMALLEST_PIECE = 1 << 20
"""Size in bytes below which a copy is not divided further."""


class SleepMemory(Protocol):
    """Memory of a rank, released while no request is running."""

    def release(self, parts: Sequence[str], *, keep_weights: bool) -> int:
        """Release parts that are awake. Returns the number of bytes freed."""

    def restore(self, part: str) -> None:
        """Restore a part. Without keep_weights, the weights are undefined until the next update."""


class CpuMemory:
    """SleepMemory on CPU: only the KV cache of `rank` is released."""

    def __init__(self, rank: RankMemory) -> None:
        self._rank = rank

    def release(self, parts: Sequence[str], *, keep_weights: bool) -> int:
        return self._rank.release_kv_cache() if KV_CACHE in parts else 0

    def restore(self, part: str) -> None:
        if part == KV_CACHE:
            self._rank.restore_kv_cache()


class TaggedMemory:
    """SleepMemory on a GPU. torch_memory_saver releases physical memory by tag and maps new memory to the same
    addresses, so tensors and CUDA graphs stay valid. The new memory has undefined contents.

    pause, resume: SGLang's functions that release and restore tags.
    model: SGLang stores the buffers itself; parameters and other tensors of its modules are copied here if they are
        kept.
    cleared: tensors of the KV cache's tag.
    settle: function that waits until the GPU has finished its work, which may use the memory, and returns the free
        memory in bytes.
    """

    def __init__(
        self,
        pause: Callable[[list[str]], object],
        resume: Callable[[list[str]], object],
        model: torch.nn.Module,
        cleared: Iterable[torch.Tensor],
        settle: Callable[[], int],
    ) -> None:
        self._pause, self._resume, self._settle = pause, resume, settle
        self._model = model
        self._cleared = list(cleared)
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Bytes of device memory, and their copies in host memory."""

    def release(self, parts: Sequence[str], *, keep_weights: bool) -> int:
        if WEIGHTS in parts:
            self._kept = self._copies() if keep_weights else []
        free = self._settle()
        self._pause(list(parts))
        return self._settle() - free

    @torch.inference_mode()
    def restore(self, part: str) -> None:
        self._resume([part])
        if part == WEIGHTS:
            for device, host in self._kept:
                device.copy_(host)
            self._kept = []
        else:
            # Kernels multiply masked values, which must not be NaN. Padded rows of a CUDA graph read row 0 of the table
            # of slots, which SGLang never writes: an undefined slot would be an illegal address.
            for tensor in self._cleared:
                tensor.zero_()

    @torch.inference_mode()
    def _copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copy the weights to pinned host memory."""
        not_weights = {storage_key(tensor) for tensor in self._cleared}
        # Tensors may share a storage.
        stored = {storage_key(tensor): tensor.untyped_storage() for tensor in _tensors(self._model)}
        copies = []
        for key in stored.keys() - not_weights:
            whole = torch.empty(0, dtype=torch.uint8, device=stored[key].device).set_(stored[key])
            for device in whole.split(piece_sizes(len(whole))):
                host = torch.empty(device.shape, dtype=torch.uint8, pin_memory=device.is_cuda)
                copies.append((device, host.copy_(device)))
        return copies


def piece_sizes(num_bytes: int) -> list[int]:
    """Divide `num_bytes` into powers of two of at least SMALLEST_PIECE, largest first, and a rest.

    torch rounds pinned allocations up to a power of two and keeps them: one copy of 130 MiB would take 256 MiB.
    """
    bits = range(num_bytes.bit_length() - 1, SMALLEST_PIECE.bit_length() - 2, -1)
    sizes = [1 << bit for bit in bits if num_bytes & 1 << bit]
    rest = num_bytes - sum(sizes)
    return [*sizes, rest] if rest else sizes


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters, and tensors that are plain attributes of modules, such as w_kc of latent attention."""
    for module in model.modules():
        yield from module.parameters(recurse=False)
        yield from (each for each in vars(module).values() if isinstance(each, torch.Tensor) and not each.is_meta)


def kv_caches(scheduler: Scheduler) -> list[torch.Tensor]:
    """Return the tensors of the KV cache.

    Raises: ConfigError for a kind of cache whose tensors are not known.
    """
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    lists = [getattr(pool, name, None) or [] for name in ("k_buffer", "v_buffer", "kv_buffer")]
    if not any(lists):
        raise ConfigError(
            f"SGLang keeps the KV cache of this model in a {type(pool).__name__}, which cannot be released during "
            "sleep; set rollout.engine, or judge.engine for a judge, to vllm"
        )
    return [tensor for tensors in lists for tensor in tensors]
