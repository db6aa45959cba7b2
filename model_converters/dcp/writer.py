"""Writer of torch.distributed.checkpoint files that keeps one tensor in memory at a time.

torch's FileSystemWriter keeps all tensors of a file in memory until the file is closed. This writer produces the same
format: entries are written by torch.save one after another, and torch's planner and `finish` build the metadata.
Source: torch.distributed.checkpoint.filesystem, default_planner (2.13).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from model_converters.dcp.blocks import CheckpointChunk, ShardedRankState, StateObject
from model_converters.dcp.partial_checkpoint import Span
from model_converters.errors import ConversionError, listing
from model_converters.hf.shards import split_files

# Upper bound of the bytes that torch.save adds to a tensor, for the estimate of disk space.
_ENTRY_BYTES = 2048


@dataclass(frozen=True)
class FileEntry:
    """Tensor block or object in a file; dtype is None for an object."""

    content: CheckpointChunk | StateObject
    dtype: torch.dtype | None

    @property
    def num_bytes(self) -> int:
        if isinstance(self.content, StateObject) or self.dtype is None:
            return 0
        return self.content.local.volume * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedFile:
    """A file of one rank and its entries, in order."""

    name: str
    rank: int
    entries: tuple[FileEntry, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors in the file."""
        return sum(entry.num_bytes for entry in self.entries)


def plan_files(
    rank: int, state: ShardedRankState, dtypes: Mapping[str, torch.dtype], max_file_bytes: int
) -> list[PlannedFile]:
    """Distribute a rank's entries over files of at most `max_file_bytes`; a larger tensor gets a file of its own.

    dtypes: mcore name -> dtype.
    """
    # Objects are small; all of a rank go into its first file.
    entries = [FileEntry(item, None) for item in state.objects]
    entries += [FileEntry(chunk, dtypes[chunk.mcore_name]) for chunk in state.chunks]
    files = split_files(entries, lambda entry: entry.num_bytes, max_file_bytes)
    return [PlannedFile(f"__{rank}_{number}.distcp", rank, tuple(file)) for number, file in enumerate(files)]


def space_needed(files: Iterable[PlannedFile]) -> int:
    """Return an upper bound of the bytes on disk."""
    return sum(file.num_bytes + _ENTRY_BYTES * len(file.entries) for file in files)


def plan_metadata(files: Sequence[PlannedFile]) -> Metadata:
    """Build torch's metadata of the checkpoint; write_metadata adds the locations of the entries.

    Raises: ConversionError if the chunks do not tile every tensor exactly once, or differ in dtype.
    """
    plans = [SavePlan([_write_item(entry) for entry in file.entries]) for file in files]
    try:
        _, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    except (ValueError, AssertionError) as error:
        raise ConversionError(f"the ranks of this layout do not cover every tensor exactly once: {error}") from error
    # torch (2.13) checks that chunks cover a tensor only if there are several plans, so count the elements here.
    stored = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, dcp.TensorStorageMetadata)}
    untiled = [key for key, tensor in stored.items() if sum(prod(c.sizes) for c in tensor.chunks) != prod(tensor.size)]
    if untiled:
        raise ConversionError(f"the ranks of this layout cover only parts of {listing(untiled)}")
    _check_dtypes(files)
    return metadata


def _check_dtypes(files: Sequence[PlannedFile]) -> None:
    first: dict[str, tuple[torch.dtype | None, str]] = {}
    for entry in (entry for file in files for entry in file.entries):
        if isinstance(entry.content, CheckpointChunk):
            dtype, name = first.setdefault(entry.content.key, (entry.dtype, entry.content.mcore_name))
            if dtype != entry.dtype:
                raise ConversionError(
                    f"{name} is {dtype} and {entry.content.mcore_name} is {entry.dtype}, but megatron stores them in "
                    f"one tensor, {entry.content.key}; convert the source to one dtype first"
                )


def _write_item(entry: FileEntry) -> WriteItem:
    content = entry.content
    if isinstance(content, StateObject):
        return WriteItem(index=dcp.MetadataIndex(content.key), type=WriteItemType.BYTE_IO)
    assert entry.dtype is not None
    offset, shape = (torch.Size(sizes) for sizes in content.stored)
    data = TensorWriteData(
        chunk=dcp.ChunkStorageMetadata(offsets=offset, sizes=shape),
        properties=dcp.TensorProperties(dtype=entry.dtype),
        size=torch.Size(content.global_shape),
    )
    return WriteItem(index=dcp.MetadataIndex(content.key, offset), type=WriteItemType.SHARD, tensor_data=data)


def write_file(
    directory: Path,
    file: PlannedFile,
    tensor_of: Callable[[CheckpointChunk], torch.Tensor],
    advance: Callable[[int], None],
    *,
    on_write: Callable[[bytes], None] | None = None,
) -> list[Span]:
    """Write one file and fsync it. Returns the span of each entry.

    `tensor_of` loads one tensor at a time, so that only one is in memory. `advance` is called with the bytes of
    each tensor after it is written. `on_write` receives all bytes in order, for example to compute a checksum.

    Raises: OSError, for example when the disk is full.
    """
    spans = []
    with ExitStack() as stack:
        # torch.load does not check the CRC32 of torch.save, and computing it takes as long as writing.
        stack.callback(torch.serialization.set_crc32_options, torch.serialization.get_crc32_options())
        torch.serialization.set_crc32_options(False)
        raw = stack.enter_context((directory / file.name).open("wb"))
        stream = _ObservedFile(raw, on_write)
        for entry in file.entries:
            start = stream.tell()
            if isinstance(entry.content, StateObject):
                stream.write(entry.content.data)
            else:
                # Megatron stacks layers and experts: the stored block has leading dimensions of size 1.
                stream.save(tensor_of(entry.content).view(entry.content.stored.shape))
            spans.append((start, stream.tell() - start))
            advance(entry.num_bytes)
        raw.flush()
        os.fsync(raw.fileno())
    return spans


class _ObservedFile:
    """Sequential output file that passes all written bytes to `on_write`."""

    def __init__(self, raw: BinaryIO, on_write: Callable[[bytes], None] | None) -> None:
        self._raw, self._on_write = raw, on_write
        self._failure: OSError | None = None

    def save(self, tensor: torch.Tensor) -> None:
        """Write a tensor with torch.save.

        Raises: OSError. torch 2.13 replaces it by a RuntimeError about file positions; the original is raised here.
        """
        try:
            torch.save(tensor, self)
        except RuntimeError as error:
            if self._failure is not None:
                raise self._failure from error
            raise

    def write(self, data: bytes) -> int:
        try:
            written = self._raw.write(data)
        except OSError as error:
            self._failure = error
            raise
        if self._on_write is not None:
            self._on_write(data)
        return written

    def tell(self) -> int:
        return self._raw.tell()

    def flush(self) -> None:
        self._raw.flush()


class _MetadataWriter(FileSystemWriter):
    """FileSystemWriter whose metadata does not contain the directory's path."""

    def storage_meta(self) -> dcp.StorageMeta:
        return dcp.StorageMeta()


def write_metadata(
    directory: Path, metadata: Metadata, files: Sequence[PlannedFile], spans: Mapping[str, Sequence[Span]]
) -> None:
    """Add the locations of all entries to the metadata and write it."""
    results = [
        WriteResult(_write_item(entry).index, length, _StorageInfo(file.name, start, length))
        for file in files
        for entry, (start, length) in zip(file.entries, spans[file.name], strict=True)
    ]
    _MetadataWriter(directory).finish(metadata, [results])
