"""Read access to a Megatron-Core distributed checkpoint by HF tensor names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from model_converters.dcp.blocks import Box, CheckpointChunk, slice_box
from model_converters.dcp.reader import DcpReader
from model_converters.errors import ConversionError, listing
from model_converters.families.parts.adapter_rows import PREFIX
from model_converters.hf.writer import plan_bytes
from model_converters.mapping.placement import Piece, TensorPlan, local_shape, segments_of
from model_converters.mapping.table import BoundRow, exported_parts
from model_converters.mapping.transforms import Shape

# Keys of trainer state next to the model's weights. megatron-core 0.16.1 writes the optimizer's; mcore-rl writes
# `reference.`, and `average.N.` for each average of teacher.moving_average.
_TRAINER_STATE = re.compile(r"((chained_\d+\.)?optimizer|reference|average\.\d+)\.")


@dataclass(frozen=True, slots=True)
class _StoredBlock:
    """Block `target` of an HF tensor and the block `stored` of checkpoint tensor `chunk.key` with its values."""

    chunk: CheckpointChunk
    stored: Box
    target: Box


class McoreCheckpoint:
    """HF tensors of a checkpoint by name. Reading a tensor reads only the chunks that contain parts of it.

    `config` and the table `bound` describe the model; `chunks` locate its tensors in the checkpoint, for one rank that
    holds the whole model. `has_value_head`: the model computes values instead of logits (hf/value_head.py).

    plans: HF tensors that can be read, one piece each, in table order.
    problems: other HF names of the table -> reason why they cannot be read.
    unknown: checkpoint keys that belong neither to the model nor to a trainer's state.
    redundant: optional HF names -> HF name with the same values.
    repeated: names of `plans` that an HF directory may omit.
    """

    def __init__(
        self,
        config: dict[str, object],
        bound: Sequence[BoundRow],
        chunks: Sequence[CheckpointChunk],
        reader: DcpReader,
        *,
        has_value_head: bool = False,
    ) -> None:
        self.config, self._reader, self.has_value_head = config, reader, has_value_head
        self._parts: dict[str, list[_StoredBlock]] = {}
        self.plans: list[TensorPlan] = []
        self.problems: dict[str, str] = {}
        by_mcore: dict[str, list[CheckpointChunk]] = {}
        for chunk in chunks:
            by_mcore.setdefault(chunk.mcore_name, []).append(chunk)
        for row in bound:
            if not row.row.copy_of_embedding:
                for part in range(len(row.hf)):
                    self._add(row, part, by_mcore.get(row.mcore, []))
        self.redundant = {name: row.hf[0] for row in bound for name in row.row.redundant}
        self.repeated = {row.hf[0] for row in bound if row.row.repeats}
        # An export would lose a tensor that belongs neither to the model nor to the trainer state.
        known = {chunk.key for chunk in chunks}
        self.unknown = sorted(key for key in reader.shapes if key not in known and not _TRAINER_STATE.match(key))
        self.shapes: dict[str, Shape] = {plan.hf_name: plan.shape for plan in self.plans}
        reader.cache_bytes = max(map(plan_bytes, self.plans), default=0)

    def require_complete(self) -> None:
        """Require that the checkpoint contains exactly this model.

        Raises: one ConversionError that lists every unreadable tensor and every tensor without a row.
        """
        if any(key.startswith(PREFIX) for key in self.unknown):
            raise ConversionError(
                f"{self._reader.directory} contains the adapters of a LoRA run without the base model; the run exports "
                "the merged model with trainer.export_hf, and the adapters with trainer.export_adapter"
            )
        problems = [f"{name}: {problem}" for name, problem in self.problems.items()]
        problems += [f"{key} has no row in the weight table" for key in self.unknown]
        if problems:
            raise ConversionError(f"{self._reader.directory} does not contain this model: {listing(problems)}")

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(self._parts[name][0].chunk.key)

    def read(self, name: str) -> torch.Tensor:
        """Read a whole HF tensor. It may share memory with a cached chunk: do not write to it.

        Raises: ConversionError naming the tensor.
        """
        parts, shape = self._parts[name], self.shapes[name]
        try:
            if len(parts) == 1:
                return self._reader.read(parts[0].chunk.key, parts[0].stored).reshape(shape)
            out = torch.empty(shape, dtype=self.dtype(name))
            for part in parts:
                self._fill(part, out)
        except ConversionError as error:
            raise ConversionError(f"{name}: {error}") from error
        return out

    def _fill(self, part: _StoredBlock, out: torch.Tensor) -> None:
        # A separate function: the local `block` is a view of a whole chunk and must be freed before the next read.
        block = self._reader.read(part.chunk.key, part.stored)
        part.target.view(out).copy_(block.reshape(part.target.shape))

    def _add(self, row: BoundRow, part: int, chunks: Sequence[CheckpointChunk]) -> None:
        name, shape, dim = row.hf[part], row.row.shapes[part], row.row.dim
        parts = self._parts[name] = list(_parts(row, part, chunks))
        problem = self._problem(shape, parts)
        if problem is not None:
            self.problems[name] = problem
            return
        whole = Piece(0, row.mcore, part, dim, 0, shape[dim] if shape else 1, 0)
        stored = exported_parts(row)[part]
        self.plans.append(TensorPlan(name, shape, self.dtype(name), row.group, (whole,), stored))

    def _problem(self, shape: Shape, parts: Sequence[_StoredBlock]) -> str | None:
        if sum(part.target.volume for part in parts) != prod(shape):
            return "megatron's model does not contain it"
        for part in parts:
            problem = self._reader.problem(part.chunk.key, part.stored)
            if problem is None and not part.chunk.padded:
                stored_shape = self._reader.shapes[part.chunk.key]
                if stored_shape != part.chunk.global_shape:
                    problem = (
                        f"{part.chunk.key} is {stored_shape} in the checkpoint, {part.chunk.global_shape} in the model"
                    )
            if problem is not None:
                return problem
        return None


def _parts(row: BoundRow, part: int, chunks: Sequence[CheckpointChunk]) -> Iterator[_StoredBlock]:
    shape, dim = row.row.shapes[part], row.row.dim
    whole = local_shape(row.row, 1)
    for segment in segments_of(row.row, 0, 1):
        if segment.part != part:
            continue
        local = slice_box(whole, dim, segment.local_start, segment.length)
        target = slice_box(shape, dim, segment.start, segment.length)
        for chunk in chunks:
            common = local.overlap(chunk.local)
            if common is None:
                continue
            # Leading dimensions of the stored tensor stack layers and experts; the block has size 1 in each of them.
            stacked = len(chunk.stored.shape) - len(common.shape)
            inner = common.moved(chunk.local.offset, chunk.stored.offset[stacked:])
            stored = Box(chunk.stored.offset[:stacked] + inner.offset, (1,) * stacked + inner.shape)
            yield _StoredBlock(chunk, stored, common.moved(local.offset, target.offset))
