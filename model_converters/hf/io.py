"""Lazy reader of HF checkpoints that dequantises and merges adapters while reading; re-exports the writer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Self

import torch

from model_converters.errors import ConversionError, listing
from model_converters.families import family_for
from model_converters.families.parts.hf_config import flag, fp8_block, int4_group, read_hf_config, weights_dtype
from model_converters.families.parts.quantization import refuse_tensors
from model_converters.hf import stacked, tensor_kinds
from model_converters.hf.adapter_reader import LoraAdapter, LowRankUpdate
from model_converters.hf.computed_tensor import ComputedTensor
from model_converters.hf.index import read_headers
from model_converters.hf.int4 import split_packed
from model_converters.hf.shards import StoredTensor, TensorFiles
from model_converters.hf.unlisted_files import find_unlisted
from model_converters.hf.writer import HFWriter
from model_converters.mapping.table import bind
from model_converters.mapping.transforms import Shape
from model_converters.text_model import text_tensors
from model_converters.vision_model import VISION_TYPES, tower_tensors

__all__ = ["HFCheckpoint", "HFWriter"]


class HFCheckpoint:
    """An HF directory: config.json and safetensors, in one file or in shards with an index.

    The constructor reads the headers of all shards and checks them against the index and the file sizes. Tensors are
    read on demand, slice by slice.

    - FP8 and INT4 weights are dequantised in float32 and rounded once to the target's dtype; `shapes` contains the
      weights without scales and words.
    - `lora`, the directory of a PEFT adapter, is merged the same way: base + scale * B A.
    - Tensors that stack the experts of a layer are read as one tensor per expert; `shapes` contains the latter.
    - Saved rotary frequencies are compared with config.json; `shapes` does not contain them.
    - `unlisted` describes the weight files, and the tensors of vision towers, that are ignored; `ignored` names the
      tensors that transformers' class does not read, which `shapes` does not contain either.
    - Tensors and config.json are the text model's, if the release also reads images (see text_model.py), unless the
      family has its vision tower (see vision_model.py).

    Raises: ConversionError naming the file, for a missing config.json, an unsupported model_type or quantisation, a
    missing or truncated shard, an index that does not fit its shards, unlisted files with other tensors, FP8 weights
    and scales that do not match, an adapter that does not fit the model, and frequencies that contradict config.json.
    """

    def __init__(self, directory: Path | str, lora: Path | str | None = None) -> None:
        self.directory = Path(directory)
        self.config: dict[str, object] = read_hf_config(self.directory)
        try:
            self.family, self.block = family_for(self.config), fp8_block(self.config)
            group = int4_group(self.config)
        except ConversionError as error:
            raise ConversionError(f"{self.directory / 'config.json'}: {error}") from None
        headers = read_headers(self.directory)
        # Before the tensors are split: an unlisted file may also contain scales and buffers.
        self.unlisted = find_unlisted(self.directory, headers)
        reads_images = self.config["model_type"] in VISION_TYPES
        listed, images = (tower_tensors(headers), list[str]()) if reads_images else text_tensors(headers)
        if images:
            note = f"{len(images)} tensors of the vision tower are left out"
            self.unlisted = replace(self.unlisted, notes=(*self.unlisted.notes, note))
        self.ignored = sorted(name for name in listed if name.startswith(self.family.ignored_tensors))
        listed = {name: stored for name, stored in listed.items() if name not in self.ignored}
        listed, self._parts = self._unstacked(listed)
        listed, self._packed, problems = split_packed(listed, group)
        if problems:
            raise ConversionError(f"{self.directory}: INT4 words and scales do not match: {listing(problems)}")
        refuse_tensors(listed, self.directory)
        tensors, buffers = tensor_kinds.split_buffers(listed)
        self._stored, self._scales = tensor_kinds.split_scales(tensors, self.block, self.directory)
        tensor_kinds.require_floating(self._stored)
        self._stored |= {name: packed.values for name, packed in self._packed.items()}
        self.shapes: dict[str, Shape] = {name: stored.shape for name, stored in self._stored.items()}
        self.shapes |= {name: part.shape for name, part in self._parts.items()}
        self._replaced: dict[str, torch.dtype] = {}
        updates = self._merge(lora) if lora is not None else {}
        self._computed = {
            name: ComputedTensor(name, self._find(name), self._scales.get(name), self.block, updates.get(name))
            for name in {*self._scales, *self._parts, *updates} - self._packed.keys()
        }
        for name, (words, scales) in self._packed.items():
            self._computed[name] = ComputedTensor(name, words, scales, (1, group or 1), updates.get(name), packed=True)
        self._files = TensorFiles()
        if buffers:
            self._check_buffers(buffers)

    def _unstacked(
        self, listed: dict[str, StoredTensor]
    ) -> tuple[dict[str, StoredTensor], dict[str, stacked.StackedPart]]:
        """Replace tensors with all experts of a layer by the table's tensors of single experts."""
        if not stacked.has_stacked_experts(listed):
            return listed, {}
        try:
            rows = [row for row in self.family.rows(self.config) if row.stored]
            return stacked.unstack(listed, bind(rows, self.config, torch.bfloat16))
        except ConversionError as error:
            raise ConversionError(f"{self.directory}: {error}") from None

    def _check_buffers(self, buffers: dict[str, StoredTensor]) -> None:
        try:
            arguments = self.family.model_arguments(self.config)
            for name, stored in buffers.items():
                tensor_kinds.check_frequencies(name, self._files.read(name, stored), arguments)
        except ConversionError as error:
            raise ConversionError(f"{self.directory}: {error}") from None
        finally:
            self._files.close()

    def _merge(self, directory: Path | str) -> Mapping[str, LowRankUpdate]:
        """Substitute an adapter's whole tensors, which reads convert to the base dtype, and return its updates."""
        adapter = LoraAdapter(directory, self.shapes, tied=flag(self.config, "tie_word_embeddings"))
        for name in adapter.replaced:
            self._replaced[name] = self.dtype(name)
        self._stored |= adapter.replaced
        self._parts = {name: part for name, part in self._parts.items() if name not in adapter.replaced}
        # A replacement is not quantised: the scales of the base tensor do not apply to it.
        self._scales = {name: scales for name, scales in self._scales.items() if name not in adapter.replaced}
        self._packed = {name: packed for name, packed in self._packed.items() if name not in adapter.replaced}
        return adapter.updates

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Existing views keep their mapping alive."""
        self._files.close()

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the values; for quantised weights this is the model's dtype in config.json."""
        stored = self._find(name)
        if name in self._replaced:
            return self._replaced[name]
        return weights_dtype(self.config) if name in self._scales or name in self._packed else stored.dtype

    @property
    def quantisation(self) -> str:
        """Name of the format of the quantised weights; empty if there are none."""
        return "FP8" if self.block is not None else "INT4" if self._packed else ""

    def position(self, name: str) -> tuple[str, int]:
        """Return (file name, byte offset), a sort key for sequential reading."""
        stored = self._find(name)
        return stored.file.name, stored.offset

    def stored(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read the stored (tensor, scales of its FP8 blocks or None) without dequantising or merging."""
        scales = self._scales.get(name)
        return self._files.read(name, self._stored[name]), self._files.read(name, scales) if scales else None

    def stored_scales(self) -> dict[str, torch.Tensor]:
        """Read the scales of all FP8 weights in their stored dtype."""
        return {name: self._files.read(name, scales) for name, scales in self._scales.items()}

    def view(
        self,
        name: str,
        dim: int = 0,
        start: int = 0,
        length: int | None = None,
        rows: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Return a slice as a view of the privately mapped file; pages are read on first use and freed with the view.

        Quantised and merged weights are computed into new memory instead. `rows` is like Piece's.
        """
        stored = self._find(name)
        if name in self._computed:
            shape = list(stored.shape)
            shape[dim] = shape[dim] if length is None else length
            if rows is not None:
                shape[0] = rows[1] - rows[0]
            out = torch.empty(shape, dtype=self.dtype(name))
            self.read_into(name, out, dim=dim, start=start, rows=rows)
            return out
        whole = self._files.mapped(self._stored[name]).to(self.dtype(name))
        if length is None or not stored.shape:
            return whole
        return _part(whole, dim, start, length, rows)

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor into new memory."""
        out = torch.empty(self._find(name).shape, dtype=self.dtype(name))
        self.read_into(name, out)
        return out

    def read_into(
        self, name: str, out: torch.Tensor, *, dim: int = 0, start: int = 0, rows: tuple[int, int] | None = None
    ) -> None:
        """Fill `out` with indices [start, start + out.shape[dim]) of `dim`, converting dtype and device. `rows` is like
        Piece's.

        A slice that is contiguous in the file is read directly into `out` if that is contiguous CPU memory of the same
        dtype, without mapping the file or copying twice.
        """
        found = self._find(name)
        # Rows of whole columns are one slice along dim 0, which may be contiguous in the file.
        if rows is not None and out.shape[dim] == found.shape[dim]:
            dim, start, rows = 0, rows[0], None
        _check_slice(name, found, out, dim, start, rows)
        if name in self._computed:
            row, column = (start, 0) if dim == 0 else (rows[0] if rows else 0, start)
            self._computed[name].read_into(self._files, out, row=row, column=column)
            return
        stored = self._stored[name]
        if not (out.dtype == stored.dtype and out.device.type == "cpu" and out.is_contiguous()):
            out.copy_(self.view(name, dim, start, out.shape[dim] if out.dim() else 1, rows))
            return
        # The slice is contiguous in the file if all dimensions before `dim` have size 1.
        if prod(stored.shape[:dim]) != 1 and tuple(out.shape) != stored.shape:
            out.copy_(_part(self._files.mapped(stored), dim, start, out.shape[dim], rows))
            return
        skipped = start * prod(stored.shape[dim + 1 :]) * stored.dtype.itemsize
        self._files.fill(name, stored, out, skipped=skipped)

    def _find(self, name: str) -> StoredTensor | stacked.StackedPart:
        stored = self._stored.get(name) or self._parts.get(name)
        if stored is None:
            raise ConversionError(f"{self.directory} has no tensor {name}")
        return stored


def _part(whole: torch.Tensor, dim: int, start: int, length: int, rows: tuple[int, int] | None) -> torch.Tensor:
    part = whole.narrow(dim, start, length)
    return part if rows is None else part[slice(*rows)]


def _check_slice(
    name: str,
    stored: StoredTensor | stacked.StackedPart,
    out: torch.Tensor,
    dim: int,
    start: int,
    rows: tuple[int, int] | None,
) -> None:
    fits = out.dim() == len(stored.shape)
    if fits and out.dim():
        rest = (*stored.shape[:dim], *stored.shape[dim + 1 :])
        if rows is not None:
            fits = 0 <= rows[0] <= rows[1] <= stored.shape[0]
            rest = (rows[1] - rows[0], *rest[1:])
        fits = fits and (*out.shape[:dim], *out.shape[dim + 1 :]) == rest
        fits = fits and 0 <= start <= stored.shape[dim] - out.shape[dim]
    if not fits:
        raise ConversionError(
            f"{stored.file}: {name} {stored.shape} has no slice of shape {tuple(out.shape)} from {start} of dim {dim}"
        )
