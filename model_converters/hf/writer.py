"""Sharded, atomic writer of HF directories for many processes. Import it from io.py."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, Self

import torch

from model_converters.durable_files import sync, write_json
from model_converters.errors import ConversionError, listing
from model_converters.families import missing_engine_fields
from model_converters.families.parts.hf_config import read_hf_config
from model_converters.hf.fp8_export import exported_config
from model_converters.hf.index import INDEX_NAME, SINGLE_NAME
from model_converters.hf.quant import FP8
from model_converters.hf.shards import StoredTensor, TensorFiles, as_bytes, layout_shard, split_files, write_exactly
from model_converters.hf.side_files import copy_side_files
from model_converters.hf.stacked import matrix_of, rows_of
from model_converters.mapping.placement import Piece, TensorPlan
from model_converters.mapping.table import StoredPart
from model_converters.mapping.transforms import Shape
from model_converters.vision_model import nested_fields


def plan_bytes(plan: TensorPlan) -> int:
    """Return the size of the whole tensor in bytes."""
    return prod(plan.shape) * plan.dtype.itemsize


class HFWriter:
    """Writer of an HF directory from planned pieces. The target appears only when it is complete.

    The plans fix the file offset of every byte. Any process that shares the file system writes its pieces in place, in
    any order: nothing is gathered, and no rank needs memory for more than its own piece.

        owner (one process):  begin(plans)   barrier   write(...)*           barrier   finish(source)
        every other process:            barrier   attach(plans) write(...)* close()  barrier

    Files are written to `.<name>.partial` next to the target, which is renamed at the end. If a `with` block raises,
    the owner removes the partial directory.
    """

    def __init__(self, directory: Path | str, max_shard_bytes: int = 5 * 2**30) -> None:
        self.directory = Path(directory).absolute()
        self.max_shard_bytes = max_shard_bytes
        self.partial = self.directory.with_name(f".{self.directory.name}.partial")
        self._plans: dict[str, TensorPlan] = {}
        self._stored: dict[str, StoredTensor] = {}
        """Tensors of the files, by their names there."""
        self._files = TensorFiles(os.O_RDWR)
        self._written: dict[str, set[tuple[int, int]]] = {}
        self._owner = False

    def begin(self, plans: Sequence[TensorPlan]) -> None:
        """Create the partial directory and its shards with their headers; the data are still empty.

        Raises: ConversionError if the target exists and is not empty, cannot be created, or does not fit on the disk.
        """
        if self.directory.exists() and (not self.directory.is_dir() or any(self.directory.iterdir())):
            raise ConversionError(f"{self.directory} exists already; remove it or choose another directory")
        headers = self._lay_out(plans)
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self._check_space()
            # Left behind by a process that was killed. Unlike dcp conversions, HF exports cannot be resumed.
            if self.partial.exists():
                shutil.rmtree(self.partial)
            self.partial.mkdir()
            # From here on, abort() removes the directory.
            self._owner = True
            for file, header in headers.items():
                # Set the final size now: all processes write into the file at fixed offsets.
                file_bytes = max(s.offset + s.num_bytes for s in self._stored.values() if s.file == file)
                with file.open("wb") as opened:
                    opened.write(header)
                    opened.truncate(file_bytes)
        except OSError as error:
            raise ConversionError(f"{self.directory} cannot be written: {error}") from error

    def attach(self, plans: Sequence[TensorPlan]) -> None:
        """Attach to a directory that the owner has begun with the same plans and max_shard_bytes."""
        self._lay_out(plans)
        if not self.partial.is_dir():
            raise ConversionError(f"{self.partial} does not exist; the owner must begin() before others attach()")

    def write(self, plan: TensorPlan, piece: Piece, tensor: torch.Tensor) -> None:
        """Write one piece in place, converted to the plan's dtype. FP8 pieces must be quantised by the caller.

        Raises: ConversionError if the piece is not planned, has another shape or was written before, or if the disk is
        full.
        """
        self._check_piece(plan, piece, tensor)
        if plan.stored is not None:
            self._write_part(plan.stored, piece, tensor)
        else:
            self._write_piece(plan, piece, tensor)
        self._written.setdefault(plan.hf_name, set()).add(_place(piece))

    def _write_part(self, part: StoredPart, piece: Piece, tensor: torch.Tensor) -> None:
        """Write a piece of a part of stacked experts, which may be scattered over the matrix of the expert."""
        stored = matrix_of(self._stored[part.name], part)
        matrix = torch.empty(stored.shape, dtype=stored.dtype)
        target = rows_of(matrix, part)
        target = target.narrow(piece.dim, piece.start, piece.length)
        target = target if piece.rows is None else target[slice(*piece.rows)]
        try:
            descriptor = self._files.descriptor(stored.file)
            # Another process may write the other parts of this matrix.
            fcntl.lockf(descriptor, fcntl.LOCK_EX, stored.num_bytes, stored.offset)
            try:
                self._files.fill(part.name, stored, matrix)
                target.copy_(tensor.detach())
                write_exactly(descriptor, as_bytes(matrix), stored.offset)
            finally:
                fcntl.lockf(descriptor, fcntl.LOCK_UN, stored.num_bytes, stored.offset)
        except OSError as error:
            raise ConversionError(f"{stored.file} cannot be written: {error.strerror}") from error

    def _write_piece(self, plan: TensorPlan, piece: Piece, tensor: torch.Tensor) -> None:
        stored = self._stored[plan.hf_name]
        data = as_bytes(tensor.detach().to(device="cpu", dtype=plan.dtype).contiguous())
        whole = not plan.shape or piece.length == plan.shape[piece.dim]
        # A piece along `dim` is one contiguous run of bytes per index of the dimensions before `dim`.
        runs = 1 if whole else prod(plan.shape[: piece.dim])
        stride = stored.num_bytes // runs
        first = stored.offset + (0 if whole else piece.start * prod(plan.shape[piece.dim + 1 :]) * plan.dtype.itemsize)
        if piece.rows is not None:
            # Rows of whole runs follow each other.
            rows = piece.rows[1] - piece.rows[0]
            first += piece.rows[0] * (stored.num_bytes // plan.shape[0])
            runs = 1 if whole else runs // plan.shape[0] * rows
        try:
            descriptor = self._files.descriptor(stored.file)
            run_bytes = len(data) // runs
            for run in range(runs):
                write_exactly(descriptor, data[run * run_bytes : (run + 1) * run_bytes], first + run * stride)
        except OSError as error:
            raise ConversionError(f"{stored.file} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Fsync this process's pieces and record their names for the owner. The owner calls finish instead."""
        self._files.sync()
        self._files.close()
        # One file per process: appending to a common file is not atomic on network file systems.
        note = self.partial / f"pieces.{uuid.uuid4().hex}.json"
        write_json(note, {name: sorted(starts) for name, starts in self._written.items()})

    def finish(self, source: Path | str | None = None, config: Mapping[str, object] | None = None) -> None:
        """Check that every piece was written, add the index, config.json and tokenizer files, and rename the directory.

        source: HF directory from which config.json, generation_config.json and tokenizer files are copied.
        config: replaces the config.json of `source`. In both cases dtype and quantization are set to the written ones.
        Raises: ConversionError listing the incomplete tensors; the directory is then not renamed.
        """
        # Pieces of other processes are known from their notes only.
        self._merge_notes()
        incomplete = [
            name
            for name, plan in self._plans.items()
            if self._written.get(name, set()) != set(map(_place, plan.pieces))
        ]
        if incomplete:
            raise ConversionError(f"{self.directory}: {len(incomplete)} tensors are incomplete: {listing(incomplete)}")
        try:
            self._files.sync()
            self._files.close()
            self._write_index()
            self._add_files(source, config)
            sync(self.partial)
            os.rename(self.partial, self.directory)
            sync(self.directory.parent)
        except OSError as error:
            raise ConversionError(f"{self.directory} cannot be written: {error}") from error

    def abort(self) -> None:
        """Close the files. The owner also removes the partial directory."""
        self._files.close()
        if self._owner:
            shutil.rmtree(self.partial, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()

    def _lay_out(self, plans: Sequence[TensorPlan]) -> dict[Path, bytes]:
        self._plans = {plan.hf_name: plan for plan in plans}
        if len(self._plans) != len(plans):
            raise ConversionError(f"{self.directory}: the plan names a tensor twice")
        if not plans:
            raise ConversionError(f"{self.directory}: the plan contains no tensor")
        groups = split_files(_file_tensors(plans), lambda tensor: tensor.num_bytes, self.max_shard_bytes)
        headers = {}
        for number, group in enumerate(groups, start=1):
            name = SINGLE_NAME if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            file = self.partial / name
            headers[file], stored = layout_shard(file, [(each.name, each.dtype, each.shape) for each in group])
            self._stored.update(stored)
        return headers

    def _check_space(self) -> None:
        needed = sum(stored.num_bytes for stored in self._stored.values())
        free = shutil.disk_usage(self.directory.parent).free
        if needed > free:
            raise ConversionError(
                f"{self.directory}: the model needs {needed / 2**30:.2f} GiB, the disk has {free / 2**30:.2f} GiB free"
            )

    def _check_piece(self, plan: TensorPlan, piece: Piece, tensor: torch.Tensor) -> None:
        known = self._plans.get(plan.hf_name)
        if known is None or piece not in known.pieces:
            raise ConversionError(f"{self.directory}: {piece} of {plan.hf_name} is not planned")
        if tuple(tensor.shape) != plan.piece_shape(piece):
            raise ConversionError(
                f"{plan.hf_name}: {piece} needs shape {plan.piece_shape(piece)}, got {tuple(tensor.shape)}"
            )
        if plan.dtype == FP8 and tensor.dtype != FP8:
            raise ConversionError(f"{plan.hf_name} is planned in FP8; quantise it before writing")
        if _place(piece) in self._written.get(plan.hf_name, ()):
            raise ConversionError(f"{plan.hf_name}: {piece} is written twice")

    def _merge_notes(self) -> None:
        for note in self.partial.glob("pieces.*.json"):
            for name, starts in json.loads(note.read_text()).items():
                self._written.setdefault(name, set()).update(map(tuple, starts))
            note.unlink()

    def _write_index(self) -> None:
        files = {stored.file for stored in self._stored.values()}
        if len(files) == 1:
            return
        total = sum(stored.num_bytes for stored in self._stored.values())
        weight_map = {name: stored.file.name for name, stored in sorted(self._stored.items())}
        write_json(self.partial / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def _add_files(self, source: Path | str | None, config: Mapping[str, object] | None) -> None:
        if source is not None:
            copy_side_files(source, self.partial)
            config = config or read_hf_config(Path(source))
        if config is not None:
            exported = exported_config(config, self._plans.values())
            write_json(self.partial / "config.json", nested_fields({**exported, **missing_engine_fields(config)}))


class _FileTensor(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _file_tensors(plans: Sequence[TensorPlan]) -> list[_FileTensor]:
    """Return the tensors of the files: the planned ones, with each stacked tensor in the place of its first part.

    Raises: ConversionError for a stacked tensor of which some parts are not planned.
    """
    tensors: dict[str, _FileTensor] = {}
    planned: Counter[str] = Counter()
    for plan in plans:
        name, shape = (plan.hf_name, plan.shape) if plan.stored is None else (plan.stored.name, plan.stored.shape)
        tensors.setdefault(name, _FileTensor(name, plan.dtype, shape))
        planned[name] += prod(plan.shape)
    incomplete = [name for name, tensor in tensors.items() if planned[name] != prod(tensor.shape)]
    if incomplete:
        raise ConversionError(f"the plan lacks experts of {listing(incomplete)}")
    return list(tensors.values())


def _place(piece: Piece) -> tuple[int, int]:
    """Return the indices at which a piece begins, which identify it among the pieces of a tensor."""
    return piece.start, piece.rows[0] if piece.rows else 0
