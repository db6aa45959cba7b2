"""Reader of tensor blocks in torch.distributed.checkpoint files, independent of the chunks they were saved in."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import OrderedDict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from model_converters.dcp.blocks import Box
from model_converters.errors import ConversionError
from model_converters.mapping.transforms import Shape


class DcpReader:
    """Tensors of a checkpoint by key.

    Caches the most recently read chunks, up to `cache_bytes` and at least one: HF tensors that Megatron fuses are read
    one after another from the same chunks.
    """

    def __init__(self, directory: Path, metadata: Metadata, cache_bytes: int = 0) -> None:
        self.directory, self.cache_bytes = directory, cache_bytes
        self._storage: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._stored = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        self.shapes: dict[str, Shape] = {key: tuple(stored.size) for key, stored in self._stored.items()}
        self._chunks: dict[str, list[Box]] = {}
        # Thousands of chunks are in the same few files.
        self._size_of = cache(partial(_size_of, directory))
        self._cache: OrderedDict[tuple[str, Shape], torch.Tensor] = OrderedDict()

    def dtype(self, key: str) -> torch.dtype:
        dtype: torch.dtype = self._stored[key].properties.dtype
        return dtype

    def problem(self, key: str, box: Box) -> str | None:
        """Return the reason why a block cannot be read, or None. Checks the metadata and file sizes only."""
        if key not in self._stored:
            return f"{self.directory} has no tensor {key}"
        if len(self.shapes[key]) != len(box.shape):
            return f"{self.directory} has {key} {self.shapes[key]}"
        overlaps = self._overlaps(key, box)
        covered = sum(common.volume for _, common in overlaps)
        if covered != box.volume:
            return f"{self.directory} has {covered} of the required {box.volume} elements of {key}"
        for chunk, _ in overlaps:
            place = self._storage.get(MetadataIndex(key, chunk.offset))
            if place is None:
                return f"{self.directory} has no location for {key} {chunk.offset}"
            file_bytes = self._size_of(place.relative_path)
            if place.offset + place.length > file_bytes:
                return (
                    f"{self.directory / place.relative_path} is {'missing' if file_bytes < 0 else 'truncated'}: "
                    f"{key} {chunk.offset} ends at byte {place.offset + place.length}, the file at {max(file_bytes, 0)}"
                )
        return None

    def read(self, key: str, box: Box) -> torch.Tensor:
        """Read a block. It may share memory with a cached chunk: do not write to it.

        Raises: ConversionError naming the file and the key.
        """
        overlaps = self._overlaps(key, box)
        if len(overlaps) == 1:
            chunk, common = overlaps[0]
            return common.moved(chunk.offset, (0,) * len(chunk.offset)).view(self._load(key, chunk))
        out = torch.empty(box.shape, dtype=self.dtype(key))
        for chunk, common in overlaps:
            target = common.moved(box.offset, (0,) * len(box.offset)).view(out)
            # One expression, so that no local variable keeps this chunk alive while the next one is read.
            target.copy_(common.moved(chunk.offset, (0,) * len(chunk.offset)).view(self._load(key, chunk)))
        return out

    def _overlaps(self, key: str, box: Box) -> list[tuple[Box, Box]]:
        """Return (chunk, its intersection with the block) for every chunk that overlaps the block."""
        if key not in self._chunks:
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self._stored[key].chunks]
            self._chunks[key] = sorted(boxes)
        chunks = self._chunks[key]
        if not box.shape:
            return [(chunk, chunk) for chunk in chunks]
        # A tensor can stack thousands of experts: restrict the search to chunks whose first dimension can overlap.
        longest = max((chunk.shape[0] for chunk in chunks), default=0)
        first = bisect_left(chunks, box.offset[0] - longest + 1, key=lambda chunk: chunk.offset[0])
        overlaps = []
        for chunk in chunks[first:]:
            if chunk.offset[0] >= box.offset[0] + box.shape[0]:
                break
            common = chunk.overlap(box)
            if common is not None:
                overlaps.append((chunk, common))
        return overlaps

    def _load(self, key: str, chunk: Box) -> torch.Tensor:
        known = self._cache.get((key, chunk.offset))
        if known is not None:
            self._cache.move_to_end((key, chunk.offset))
            return known
        num_bytes = chunk.volume * self.dtype(key).itemsize
        # Evict before reading, so that the new chunk and the cache together stay within the limit.
        while self._cache and num_bytes + sum(t.nbytes for t in self._cache.values()) > self.cache_bytes:
            self._cache.popitem(last=False)
        tensor = self._read_chunk(key, chunk)
        self._cache[key, chunk.offset] = tensor
        return tensor

    def has_object(self, key: str) -> bool:
        """Return whether the object with Megatron's unique key `key` exists."""
        return MetadataIndex(key) in self._storage

    def read_object(self, key: str) -> Any:
        """Load an object that is not a tensor.

        Raises: ConversionError naming the file and the key; KeyError if the key does not exist.
        """
        return self._unpickle(self._storage[MetadataIndex(key)], key)

    def _unpickle(self, place: _StorageInfo, what: str) -> object:
        file = self.directory / place.relative_path
        try:
            with file.open("rb") as stream:
                view = _create_file_view(stream, place.offset, place.length)
                return torch.load(view, map_location="cpu", weights_only=True)
        except OSError as error:
            raise ConversionError(f"{file}: {what} cannot be read: {error.strerror}") from error
        except Exception as error:  # torch.load can raise any error on damaged data
            reason = str(error).split("\n", 1)[0] or type(error).__name__
            raise ConversionError(f"{file}: {what} is damaged: {reason}") from error

    def _read_chunk(self, key: str, chunk: Box) -> torch.Tensor:
        place = self._storage[MetadataIndex(key, chunk.offset)]
        file = self.directory / place.relative_path
        tensor = self._unpickle(place, f"{key} {chunk.offset}")
        wanted = self.dtype(key)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != wanted or tuple(tensor.shape) != chunk.shape:
            actual = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor)
            raise ConversionError(f"{file}: {key} {chunk.offset} is {actual} instead of {wanted} {chunk.shape}")
        return tensor


def _size_of(directory: Path, name: str) -> int:
    try:
        return os.stat(directory / name).st_size
    except OSError:
        return -1
