"""The safetensors file format: reading and checking of headers, reading of tensors, and writing.

A file consists of the header length (uint64, little endian), a JSON header, and the data without gaps. Our own header
reader detects a truncated shard without reading its data.
Source: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from model_converters.durable_files import durable_write
from model_converters.errors import ConversionError
from model_converters.inputs import open_regular, parse_object
from model_converters.mapping.transforms import Shape

T = TypeVar("T")
# Limit of the format; a file of another format usually yields a larger number.
_MAX_HEADER_BYTES = 100_000_000
_PREFIX_BYTES = 8
_METADATA = "__metadata__"
# Reads of this size reach the speed of memcpy; one read of a whole tensor reaches three quarters of it (measured).
_READ_BYTES = 256 * 2**10

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class StoredTensor(NamedTuple):
    """Location of a tensor in a file. Units: bytes; `offset` counts from the start of the file."""

    file: Path
    dtype: torch.dtype
    shape: Shape
    offset: int
    num_bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the locations of all tensors of a shard.

    Raises: ConversionError naming the file if it is missing, truncated, or not safetensors.
    """
    try:
        with open_regular(file) as opened:
            file_bytes = os.fstat(opened.fileno()).st_size
            prefix = opened.read(_PREFIX_BYTES)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == _PREFIX_BYTES else 0
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise ConversionError(f"{file} is not a safetensors file, or is truncated ({file_bytes} bytes)")
            if length > file_bytes - _PREFIX_BYTES:
                raise ConversionError(
                    f"{file} is truncated: its header of {length} bytes does not fit in {file_bytes} bytes"
                )
            raw = opened.read(length)
    except OSError as error:
        raise ConversionError(f"{file} cannot be read: {error.strerror}") from error
    header = _parse(file, raw)
    data_start = _PREFIX_BYTES + length
    tensors = {name: _stored(file, name, entry, data_start) for name, entry in header.items() if name != _METADATA}
    _check_extents(file, tensors, data_start, file_bytes)
    return tensors


def _parse(file: Path, raw: bytes) -> dict[str, object]:
    try:
        header = parse_object(raw)
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{file} is not a safetensors file: its header is not JSON ({error})") from error
    metadata = header.get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ConversionError(f"{file} is not a safetensors file: {_METADATA} must map strings to strings")
    return header


def _stored(file: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ConversionError(f"{file}: the header entry of {name} is malformed: {entry}")
    dtype_name = entry["dtype"]
    shape, extent = (_sizes(file, name, field, entry[field]) for field in ("shape", "data_offsets"))
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise ConversionError(f"{file}: {name} has dtype {dtype_name}, which is not supported")
    if len(extent) != 2 or extent[1] < extent[0]:
        raise ConversionError(f"{file}: {name} has data_offsets {list(extent)}; they must be [begin, end]")
    dtype, num_bytes = DTYPES[dtype_name], extent[1] - extent[0]
    if num_bytes != prod(shape) * dtype.itemsize:
        raise ConversionError(f"{file}: {name} {dtype_name} {shape} does not have {num_bytes} bytes")
    return StoredTensor(file, dtype, shape, data_start + extent[0], num_bytes)


def _sizes(file: Path, name: str, field: str, value: object) -> Shape:
    """Check a list of non-negative integers. bool is rejected, although it is a subclass of int."""
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise ConversionError(f"{file}: {name} has {field} {value}; it must be a list of whole numbers, none negative")
    return tuple(value)


def _check_extents(file: Path, tensors: dict[str, StoredTensor], data_start: int, file_bytes: int) -> None:
    # The format requires that tensors follow each other without gaps or overlaps, up to the end of the file.
    reached, last = data_start, "the header"
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if stored.offset != reached:
            raise ConversionError(f"{file}: {name} does not start where {last} ends; the file is corrupt")
        reached, last = stored.offset + stored.num_bytes, name
    if file_bytes < reached:
        raise ConversionError(f"{file} is truncated: {last} ends at byte {reached}, the file at {file_bytes}")
    if file_bytes > reached:
        raise ConversionError(f"{file} is corrupt: {file_bytes - reached} bytes follow its last tensor")


def layout_shard(
    file: Path, tensors: Sequence[tuple[str, torch.dtype, Shape]]
) -> tuple[bytes, dict[str, StoredTensor]]:
    """Return the header of a new shard and the location of each tensor. Wider dtypes come first, for alignment."""
    header: dict[str, object] = {_METADATA: {"format": "pt"}}
    begin = 0
    # sorted() is stable: tensors of one width keep the order of the plan.
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -tensor[1].itemsize):
        if dtype not in _NAMES:
            raise ConversionError(f"{name} has dtype {dtype}, which safetensors cannot hold")
        end = begin + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    # Pad with spaces, so that the data starts at a multiple of 8 bytes.
    raw += b" " * (-len(raw) % _PREFIX_BYTES)
    data_start = _PREFIX_BYTES + len(raw)
    stored = {name: _stored(file, name, entry, data_start) for name, entry in header.items() if name != _METADATA}
    return struct.pack("<Q", len(raw)) + raw, stored


def split_files(items: Iterable[T], num_bytes: Callable[[T], int], max_bytes: int) -> list[list[T]]:
    """Distribute items over files of at most `max_bytes`, in order; a larger one gets a file of its own."""
    groups: list[list[T]] = []
    filled = 0
    for item in items:
        # A file that has no bytes yet takes an item of any size.
        if not groups or (filled and filled + num_bytes(item) > max_bytes):
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += num_bytes(item)
    return groups


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a durable shard of whole tensors. One at a time is copied to the CPU.

    Raises: OSError.
    """
    header, stored = layout_shard(file, [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()])
    with durable_write(file) as opened:
        opened.write(header)
        opened.flush()
        for name, tensor in tensors.items():
            write_exactly(opened.fileno(), as_bytes(tensor.cpu().contiguous()), stored[name].offset)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; writing to it changes the tensor."""
    # Tensor.numpy() would make the storage non-resizable for good, and it may belong to a live model.
    return np.from_dlpack(tensor.detach().reshape(-1).view(torch.uint8)).data


def read_exactly(descriptor: int, target: memoryview, offset: int) -> None:
    """Fill `target` with bytes of the file, starting at `offset`.

    Raises: EOFError if the file ends first.
    """
    while target:
        read = os.preadv(descriptor, [target[:_READ_BYTES]], offset)
        if read == 0:
            raise EOFError
        target, offset = target[read:], offset + read


def write_exactly(descriptor: int, source: memoryview, offset: int) -> None:
    """Write all bytes of `source` at `offset`.

    Raises: OSError, for example if the disk is full.
    """
    while source:
        written = os.pwrite(descriptor, source, offset)
        source, offset = source[written:], offset + written


class TensorFiles:
    """Cache of open file descriptors. All reads raise ConversionError naming the file and the tensor."""

    def __init__(self, flags: int = os.O_RDONLY) -> None:
        self._flags, self._descriptors = flags, dict[Path, int]()

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def sync(self) -> None:
        """Flush the open files to the disk."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)

    def descriptor(self, file: Path) -> int:
        # A conversion reads thousands of tensors from the same few files.
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, self._flags)
        return self._descriptors[file]

    def read(self, name: str, stored: StoredTensor) -> torch.Tensor:
        """Read a whole tensor in its stored dtype."""
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill(name, stored, out)
        return out

    def mapped(self, stored: StoredTensor) -> torch.Tensor:
        """Return a whole tensor as a view of the privately mapped file."""
        if stored.num_bytes == 0:
            return torch.empty(stored.shape, dtype=stored.dtype)
        # The offset of a mapping must be a multiple of the page size.
        skipped = stored.offset % mmap.ALLOCATIONGRANULARITY
        descriptor, num_bytes = self.descriptor(stored.file), skipped + stored.num_bytes
        # Copy on write: torch wants writable memory, but writes must not reach the file.
        mapped = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY, offset=stored.offset - skipped)
        whole = torch.frombuffer(mapped, dtype=stored.dtype, count=prod(stored.shape), offset=skipped)
        return whole.view(stored.shape)

    def fill_rows(self, name: str, stored: StoredTensor, out: torch.Tensor, *, first: int) -> None:
        """Fill `out` with rows of a matrix, starting at row `first`."""
        self.fill(name, stored, out, skipped=first * stored.shape[1] * stored.dtype.itemsize)

    def fill(self, name: str, stored: StoredTensor, out: torch.Tensor, *, skipped: int = 0) -> None:
        """Fill a contiguous CPU tensor of the stored dtype, starting `skipped` bytes into the stored tensor."""
        try:
            read_exactly(self.descriptor(stored.file), as_bytes(out), stored.offset + skipped)
        except (OSError, EOFError) as error:
            reason = error or "unexpected end of file"
            raise ConversionError(f"{stored.file}: {name} cannot be read: {reason}") from error
