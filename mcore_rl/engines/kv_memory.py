"""Memory of a rank's KV cache, freed while the engine sleeps. The tensors stay, because the engine holds references."""

from __future__ import annotations

from collections.abc import Iterable

import torch

FreedStorages = list[tuple[torch.UntypedStorage, int]]
"""Storages and their sizes in bytes before they were freed."""


def free_storages(tensors: Iterable[torch.Tensor]) -> FreedStorages:
    """Free the memory of tensors, which may share it."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    freed = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in freed:
        storage.resize_(0)
    return freed


def restore_storages(freed: FreedStorages) -> None:
    """Allocate the memory again, filled with zeros like an engine's new cache.

    Attention multiplies masked values too, so they must not be NaN.
    """
    for storage, num_bytes in freed:
        storage.resize_(num_bytes)
        torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
