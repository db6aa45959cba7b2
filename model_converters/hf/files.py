"""Open safetensors files and reads of tensor bytes from them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from model_converters.errors import ConversionError
from model_converters.hf.shards import StoredTensor, as_bytes, read_exactly


class TensorFiles:
    """Cache of open file descriptors. All reads raise ConversionError naming the file and the tensor."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def descriptor(self, file: Path) -> int:
        # A conversion reads thousands of tensors from the same few files.
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY)
        return self._descriptors[file]

    def read(self, name: str, stored: StoredTensor) -> torch.Tensor:
        """Read a whole tensor in its stored dtype."""
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self.fill(name, stored, out)
        return out

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
