"""Reads the bytes of tensors from safetensors files, each opened once."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from model_converters.errors import ConversionError
from model_converters.hf.shards import StoredTensor, as_bytes, read_exactly


class TensorFiles:
    """Open files. All reads raise ConversionError naming the file and the tensor."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY)
        return self._descriptors[file]

    def read(self, name: str, stored: StoredTensor) -> torch.Tensor:
        """The whole tensor, as stored."""
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill(name, stored, out)
        return out

    def fill_rows(self, name: str, stored: StoredTensor, out: torch.Tensor, *, first: int) -> None:
        """Fills `out` with rows of a matrix, as stored, from row `first` on."""
        self.fill(name, stored, out, skipped=first * stored.shape[1] * stored.dtype.itemsize)

    def fill(self, name: str, stored: StoredTensor, out: torch.Tensor, *, skipped: int = 0) -> None:
        """Fills a contiguous CPU tensor of the stored dtype from `skipped` bytes into the stored tensor on."""
        try:
            read_exactly(self.descriptor(stored.file), as_bytes(out), stored.offset + skipped)
        except (OSError, EOFError) as error:
            reason = error or "unexpected end of file"
            raise ConversionError(f"{stored.file}: {name} cannot be read: {reason}") from error
