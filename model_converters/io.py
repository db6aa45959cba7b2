"""HF checkpoints in and out: a lazy reader of slices, and the writer."""

from __future__ import annotations

import json
import mmap
import os
from math import prod
from pathlib import Path
from typing import Any, Self

import torch

from model_converters.errors import ConversionError, listing
from model_converters.families import Family, family_for
from model_converters.hf_config import read_hf_config
from model_converters.shards import StoredTensor, as_bytes, read_exactly, read_header
from model_converters.transforms import Shape
from model_converters.writer import INDEX_NAME, SINGLE_NAME, HFWriter

__all__ = ["HFCheckpoint", "HFWriter"]


class HFCheckpoint:
    """An HF directory: config.json and safetensors, one file or many with an index.

    Construction reads the headers of all shards and checks them against the index and the file sizes; tensors are
    read on demand, slice by slice.

    Raises: ConversionError naming the file: config.json missing or of an unsupported model_type, no weights, a shard
    missing or truncated, an index that does not fit its shards.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.config: dict[str, Any] = read_hf_config(self.directory)
        self.family = self._family()
        self._stored = _read_headers(self.directory)
        self.shapes: dict[str, Shape] = {name: stored.shape for name, stored in self._stored.items()}
        self._descriptors: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}

    def _family(self) -> Family:
        try:
            return family_for(self.config)
        except ConversionError as error:
            raise ConversionError(f"{self.directory / 'config.json'}: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files. Views that are still alive keep their mapping."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._maps.clear()

    def dtype(self, name: str) -> torch.dtype:
        return self._find(name).dtype

    def position(self, name: str) -> tuple[str, int]:
        """(file name, byte offset), for reading in the order of the disk."""
        stored = self._find(name)
        return stored.file.name, stored.offset

    def view(self, name: str, dim: int = 0, start: int = 0, length: int | None = None) -> torch.Tensor:
        """A slice as a view of the mapped file: private memory, nothing is read before it is used."""
        stored = self._find(name)
        if stored.num_bytes == 0:
            return torch.empty(stored.shape, dtype=stored.dtype)
        if stored.file not in self._maps:
            self._maps[stored.file] = mmap.mmap(self._descriptor(stored.file), 0, access=mmap.ACCESS_COPY)
        count = prod(stored.shape)
        whole = torch.frombuffer(self._maps[stored.file], dtype=stored.dtype, count=count, offset=stored.offset)
        whole = whole.view(stored.shape)
        if length is None or not stored.shape:
            return whole
        return whole.narrow(dim, start, length)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, in memory of its own."""
        stored = self._find(name)
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor, *, dim: int = 0, start: int = 0) -> None:
        """Fills `out` with indices start ... start + out.shape[dim] of `dim`, converting dtype and device.

        A slice that is contiguous in the file goes straight into `out` when that is contiguous CPU memory of the
        same dtype: no page of the file is mapped and nothing is copied twice.
        """
        stored = self._find(name)
        _check_slice(name, stored, out, dim, start)
        if not (out.dtype == stored.dtype and out.device.type == "cpu" and out.is_contiguous()):
            out.copy_(self.view(name, dim, start, out.shape[dim] if out.dim() else 1))
            return
        outer = prod(stored.shape[:dim])
        if outer != 1 and tuple(out.shape) != stored.shape:
            out.copy_(self.view(name, dim, start, out.shape[dim]))
            return
        skipped = start * prod(stored.shape[dim + 1 :]) * stored.dtype.itemsize
        try:
            read_exactly(self._descriptor(stored.file), as_bytes(out), stored.offset + skipped)
        except (OSError, EOFError) as error:
            raise ConversionError(
                f"{stored.file}: {name} cannot be read: {error or 'unexpected end of file'}"
            ) from error

    def _find(self, name: str) -> StoredTensor:
        stored = self._stored.get(name)
        if stored is None:
            raise ConversionError(f"{self.directory} has no tensor {name}")
        return stored

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY)
        return self._descriptors[file]


def _check_slice(name: str, stored: StoredTensor, out: torch.Tensor, dim: int, start: int) -> None:
    fits = out.dim() == len(stored.shape)
    if fits and out.dim():
        rest = (*stored.shape[:dim], *stored.shape[dim + 1 :])
        fits = (*out.shape[:dim], *out.shape[dim + 1 :]) == rest and 0 <= start <= stored.shape[dim] - out.shape[dim]
    if not fits:
        raise ConversionError(
            f"{stored.file}: {name} {stored.shape} has no slice of shape {tuple(out.shape)} from {start} of dim {dim}"
        )


def _read_headers(directory: Path) -> dict[str, StoredTensor]:
    index = directory / INDEX_NAME
    if not index.exists():
        single = directory / SINGLE_NAME
        if not single.exists():
            raise ConversionError(f"{directory} has neither {INDEX_NAME} nor {SINGLE_NAME}")
        return read_header(single)
    weight_map = _read_index(index)
    stored: dict[str, StoredTensor] = {}
    problems = []
    for file_name in sorted(set(weight_map.values())):
        header = read_header(directory / file_name)
        named = {name for name, file in weight_map.items() if file == file_name}
        if absent := sorted(named - set(header)):
            problems.append(f"{file_name} lacks {listing(absent)}")
        if unlisted := sorted(set(header) - named):
            problems.append(f"{file_name} holds {listing(unlisted)}, which the index does not place there")
        stored.update(header)
    if problems:
        raise ConversionError(f"{index} does not fit its shards: {'; '.join(problems)}")
    return stored


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{index} cannot be read as a safetensors index: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{index} has an empty weight_map")
    return {str(name): str(file) for name, file in weight_map.items()}
