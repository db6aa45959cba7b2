"""Shard map: the part of every HF tensor that each rank of an inference engine keeps, computed from the weight table.

A rank keeps runs of contiguous indices along the dimension that the trainer divides too, and all indices of the other
dimensions. There is one run, except for tensors with several sections, such as the queries, keys and values of a
convolution. No engine is needed to compute this; the engine's own record is compared with it (verify.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mcore_rl.config.quantization import BLOCK, FP8, GROUPS, INT4, UNQUANTIZED
from mcore_rl.weights.frozen import RowKey, row_key
from mcore_rl.weights.quantization import Encoding, TensorBox
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.engine_rows import is_divided, is_loaded, row_quantization
from model_converters.errors import LayoutError
from model_converters.mapping.placement import box_shape
from model_converters.mapping.table import FINAL_NORM, BoundRow, Row
from model_converters.mapping.transforms import GroupedQKV, KeyValueHeads, Sections, Segment, Shape, Vocabulary

VOCABULARY_PADDING = 64
"""vLLM and SGLang pad the number of vocabulary rows to a multiple of this before they divide them."""

IntArray = npt.NDArray[np.int64]
Box = tuple[Shape, Shape]
"""Part of a tensor: indices of its first element, and its shape."""
Boxes = tuple[Box, ...]
"""Parts of a tensor that a rank stores one after the other, in this order. They differ along one dim."""


class Portion(NamedTuple):
    """One of `total` equal portions; `number` counts from 0."""

    number: int
    total: int


WHOLE = Portion(0, 1)


class IndexRun(NamedTuple):
    """Contiguous indices of HF tensor number `part` of a row, along the row's dim."""

    part: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Consumers:
    """Ranks of an engine that keep a part of a tensor; ranks[i] keeps shard shards[i] of `num_shards`."""

    ranks: IntArray
    shards: IntArray
    num_shards: int


@dataclass(frozen=True, slots=True)
class RowPiece:
    """The same portion of every consumer's shard of a row. A row that exceeds a bucket is cut into several pieces."""

    bound: BoundRow
    portion: Portion = WHOLE


class ShardMap:
    """Assignment of tensor parts to the ranks of one engine, for one weight table and one engine layout.

    quantization: value of rollout.quantization. With "fp8", tensors of rows marked `fp8` travel as codes and scales;
    with "int4", of these the experts' tensors, in groups of `group` elements.
    frozen: rows that engines need only once; they are transferred first, in buckets of their own.
    Raises: LayoutError listing all sizes that the engine's layout does not divide.
    """

    def __init__(
        self,
        rows: Sequence[BoundRow],
        layout: EngineLayout,
        quantization: str = UNQUANTIZED,
        group: int = GROUPS[-1],
        frozen: Collection[RowKey] = (),
    ) -> None:
        self.layout = layout
        self._frozen = frozenset(frozen)
        self._quantization, self._group = quantization, group
        self._encodings: dict[tuple[torch.dtype, str], Encoding] = {}
        self.rows = [bound for bound in rows if is_loaded(bound.row, layout)]
        self._tied = any(bound.row.copy_of_embedding for bound in rows)
        num_layers = 1 + max((bound.layer for bound in self.rows if bound.layer is not None), default=-1)
        stages = layout.stage_layers(num_layers) if num_layers else []
        self._stage_of_layer = [stage for stage, layers in enumerate(stages) for _ in layers]
        self._consumers: dict[tuple[tuple[int, ...], str, int], Consumers] = {}
        # Layers and experts share rows; check each row once.
        self._check({id(bound.row): bound.row for bound in self.rows}.values())

    def consumers(self, bound: BoundRow) -> Consumers:
        """Return the consumers of a row; the same object for all rows with the same distribution."""
        # Distribution of the row over the ranks of a pipeline stage:
        #   whole    every rank keeps the complete tensors
        #   divided  slices over tp, the same for every dp
        #   experts  slices of every expert over all ranks of the stage
        #   owned    complete experts (expert_parallel): only the owner keeps this one
        owner = -1
        how = "divided" if is_divided(bound.row) else "whole"
        if bound.expert is not None and self.layout.expert_parallel:
            how, owner = "owned", self.owner(bound)
        elif bound.expert is not None and is_divided(bound.row):
            how = "experts"
        key = (self._stages(bound), how, owner)
        if key not in self._consumers:
            self._consumers[key] = self._assign(*key)
        return self._consumers[key]

    def owner(self, bound: BoundRow) -> int:
        """Return the expert-parallel rank that has the expert. The remainder goes to the first ranks, one expert each.

        Source: vllm's determine_expert_map, "linear" (0.32). SGLang has no remainder.
        """
        assert bound.expert is not None
        each, rest = divmod(bound.row.num_experts, self.layout.expert_ranks)
        larger = rest * (each + 1)
        if bound.expert < larger:
            return bound.expert // (each + 1)
        return rest + (bound.expert - larger) // each

    def is_frozen(self, bound: BoundRow) -> bool:
        return row_key(bound.row) in self._frozen

    def encoding(self, bound: BoundRow) -> Encoding:
        """Return the form in which the tensors of a row travel."""
        quantization = row_quantization(bound.row, self._quantization)
        key = (bound.dtype, quantization)
        if key not in self._encodings:
            self._encodings[key] = Encoding(*key, self._group if quantization == INT4 else 0)
        return self._encodings[key]

    def tensors(self, *, frozen: bool = False) -> Iterator[TensorBox]:
        """Yield each whole tensor that an engine loads, or the frozen ones only; codes and scales are two tensors."""
        for bound in (bound for bound in self.rows if self.is_frozen(bound) or not frozen):
            for name, shape in zip(bound.hf, bound.row.shapes, strict=True):
                yield from self.encoding(bound).boxes(name, (0,) * len(shape), shape)

    def boxes(self, rank: int) -> dict[str, Boxes]:
        """Return the parts of each HF tensor that a rank of the engine keeps, by name; as in `tensors`."""
        boxes: dict[str, Boxes] = {}
        for bound in self.rows:
            consumers = self.consumers(bound)
            for shard in consumers.shards[consumers.ranks == rank].tolist():
                for run in runs_of(bound.row, Portion(shard, consumers.num_shards)):
                    for box in self.encoding(bound).boxes(bound.hf[run.part], *run_box(bound.row, run)):
                        boxes[box.hf_name] = (*boxes.get(box.hf_name, ()), (box.first, box.shape))
        return boxes

    def pieces(self, bucket_bytes: int) -> Iterator[tuple[int, RowPiece]]:
        """Yield (bucket, piece) in the order of transfer. No rank receives more than `bucket_bytes` of one bucket.

        Raises: LayoutError if one index of a tensor is larger than a bucket.
        """
        bucket, used, frozen = 0, np.zeros(self.layout.num_ranks, np.int64), False
        for bound in self._in_order():
            if frozen and not self.is_frozen(bound):
                bucket, used = bucket + 1, np.zeros_like(used)
            frozen = self.is_frozen(bound)
            consumers, encoding = self.consumers(bound), self.encoding(bound)
            num_pieces = _num_pieces(bound.row, consumers.num_shards, encoding, bucket_bytes)
            for portion in (Portion(number, num_pieces) for number in range(num_pieces)):
                sizes = piece_bytes(bound.row, portion, consumers.num_shards, encoding)
                taken = sizes[consumers.shards]
                # One full rank closes the bucket for all, so that all ranks have the same buckets.
                if int((used[consumers.ranks] + taken).max()) > bucket_bytes:
                    bucket, used = bucket + 1, np.zeros_like(used)
                used[consumers.ranks] += taken
                yield bucket, RowPiece(bound, portion)

    def largest_layer_bytes(self) -> int:
        """Return the bytes of the largest layer in the engine rank that needs most of it."""
        num_bytes: dict[int, IntArray] = {}
        for bound in self.rows:
            if bound.layer is not None:
                consumers = self.consumers(bound)
                sizes = piece_bytes(bound.row, WHOLE, consumers.num_shards, self.encoding(bound))
                of_layer = num_bytes.setdefault(bound.layer, np.zeros(self.layout.num_ranks, np.int64))
                of_layer[consumers.ranks] += sizes[consumers.shards]
        return max((int(sizes.max()) for sizes in num_bytes.values()), default=0)

    def _in_order(self) -> list[BoundRow]:
        """Interleave pipeline stages and expert owners so that every bucket has data for all ranks; frozen rows first.

        The first layer of each stage comes first, tensor by tensor, then the second layer of each. With expert
        parallelism the first expert of every owner precedes the second ones.
        """
        keys, counts = [], dict.fromkeys((bound.group for bound in self.rows), 0)
        for bound in self.rows:
            # The position in the layer is the last key: the same tensor of all stages follows each other.
            counts[bound.group] += 1
            place = (self._layer_of_stage(bound), self._expert_of_owner(bound), counts[bound.group])
            keys.append((not self.is_frozen(bound), *place))
        order = sorted(range(len(keys)), key=keys.__getitem__)
        return [self.rows[index] for index in order]

    def _layer_of_stage(self, bound: BoundRow) -> int:
        # The embedding comes before all layers, the final norm and the head after them.
        if bound.layer is None:
            return -1 if bound.row.place == "embedding" else len(self._stage_of_layer)
        return bound.layer - self._stage_of_layer.index(self._stage_of_layer[bound.layer])

    def _expert_of_owner(self, bound: BoundRow) -> int:
        if bound.expert is None or not self.layout.expert_parallel:
            return -1
        owner = self.owner(bound)
        each, rest = divmod(bound.row.num_experts, self.layout.expert_ranks)
        return bound.expert - owner * each - min(owner, rest)

    def _stages(self, bound: BoundRow) -> tuple[int, ...]:
        last = self.layout.pp - 1
        if bound.layer is not None:
            return (self._stage_of_layer[bound.layer],)
        if bound.mcore == FINAL_NORM or bound.row.place in ("head", "mtp"):
            return (last,)
        # With a tied head the last stage needs the embedding's table too.
        return (0, last) if self._tied and last else (0,)

    def _assign(self, stages: tuple[int, ...], how: str, owner: int) -> Consumers:
        layout = self.layout
        ranks, shards = [], []
        for stage in stages:
            for dp in range(layout.dp):
                for tp in range(layout.tp):
                    flat = tp + layout.tp * dp
                    if how == "owned" and flat != owner:
                        continue
                    ranks.append(layout.rank(tp, stage, dp))
                    shards.append({"divided": tp, "experts": flat}.get(how, 0))
        num_shards = {"divided": layout.tp, "experts": layout.expert_ranks}.get(how, 1)
        return Consumers(np.array(ranks), np.array(shards), num_shards)

    def _check(self, rows: Iterable[Row]) -> None:
        problems = set()
        for row in rows:
            experts = row.num_experts > 0
            if experts and self.layout.expert_parallel:
                # Complete experts are never cut, but every rank must get at least one.
                if row.num_experts < self.layout.expert_ranks:
                    problems.add(
                        f"{row.num_experts} experts are fewer than the engine's {self.layout.expert_ranks} ranks"
                    )
                continue
            size = self.layout.expert_ranks if experts else self.layout.tp
            axis = "the engine's tp"
            refusal = _refusal(row, size) if size > 1 and is_divided(row) else ""
            quantization = row_quantization(row, self._quantization)
            if not refusal and quantization == FP8 and is_divided(row):
                refusal = _block_refusal(row, size)
            if refusal:
                problems.add(f"{row.split_by or row.mcore} {refusal.format(axis=axis)}")
        if problems:
            raise LayoutError("; ".join(sorted(problems)))


def _refusal(row: Row, num_shards: int) -> str:
    if isinstance(row.transform, Vocabulary):
        padded = _padded(row.shapes[0][row.dim])
        return f"{padded}, padded, is not a multiple of {{axis}} {num_shards}" if padded % num_shards else ""
    if isinstance(row.transform, GroupedQKV) and num_shards > row.transform.num_groups:
        groups = row.transform.num_groups
        heads = row.transform.num_heads(row.shapes, row.dim)
        if num_shards % groups:
            return f"{groups} is neither a multiple nor a divisor of {{axis}} {num_shards}"
        return f"{heads} is not a multiple of {{axis}} {num_shards}" if heads % num_shards else ""
    if isinstance(row.transform, KeyValueHeads) and num_shards > row.transform.num_heads:
        heads = row.transform.num_heads
        return f"{heads} is neither a multiple nor a divisor of {{axis}} {num_shards}" if num_shards % heads else ""
    return row.transform.refusal(row.shapes, row.dim, num_shards)


def _block_refusal(row: Row, num_shards: int) -> str:
    """Return why the shards of a row do not begin at blocks, as text that follows the name of the size."""
    for shard in range(num_shards):
        for run in runs_of(row, Portion(shard, num_shards)):
            if run.start % BLOCK:
                size = row.shapes[run.part][row.dim]
                return (
                    f"gives {size} indices, which {{axis}} {num_shards} cuts at {run.start}, inside a block of {BLOCK} "
                    "(rollout.quantization=fp8)"
                )
    return ""


@lru_cache(maxsize=1 << 16)
def runs_of(row: Row, engine_shard: Portion) -> tuple[IndexRun, ...]:
    """Return the index runs of an engine shard: one per HF tensor of the row at most, or one per section."""
    shard, num_shards = engine_shard
    if not row.shapes[0]:
        return (IndexRun(0, 0, 1),)
    lengths = [shape[row.dim] for shape in row.shapes]
    if num_shards == 1:
        return tuple(IndexRun(part, 0, length) for part, length in enumerate(lengths))
    if isinstance(row.transform, Vocabulary):
        each = _padded(lengths[0]) // num_shards
        real = min(lengths[0] - shard * each, each)
        return (IndexRun(0, shard * each, real),) if real > 0 else ()
    if isinstance(row.transform, KeyValueHeads) and num_shards > row.transform.num_heads:
        # Fewer heads than ranks: num_shards / heads neighbouring ranks keep the same head.
        heads = row.transform.num_heads
        return (IndexRun(0, shard * heads // num_shards * (lengths[0] // heads), lengths[0] // heads),)
    if isinstance(row.transform, Sections):
        return _joined(row.transform.segments(row.shapes, row.dim, shard, num_shards))
    runs = [IndexRun(part, shard * length // num_shards, length // num_shards) for part, length in enumerate(lengths)]
    if isinstance(row.transform, GroupedQKV) and num_shards > row.transform.num_groups:
        # Fewer key-value heads than ranks: num_shards / groups neighbouring ranks keep the same head.
        groups = row.transform.num_groups
        group = shard * groups // num_shards
        runs[1:] = [IndexRun(part, group * lengths[part] // groups, lengths[part] // groups) for part in (1, 2)]
    return tuple(runs)


def _joined(segments: Iterable[Segment]) -> tuple[IndexRun, ...]:
    """Return the runs of segments in the order of the HF tensors, with those that follow each other joined."""
    runs: list[IndexRun] = []
    for part, start, _, length in sorted(segments):
        if runs and runs[-1].part == part and runs[-1].start + runs[-1].length == start:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + length)
        else:
            runs.append(IndexRun(part, start, length))
    return tuple(runs)


def cut(run: IndexRun, portion: Portion, step: int) -> IndexRun:
    """Return a portion of a run, cut at multiples of `step` indices from its start."""
    steps = -(-run.length // step)
    first = steps * portion.number // portion.total * step
    end = min(steps * (portion.number + 1) // portion.total * step, run.length)
    return IndexRun(run.part, run.start + first, end - first)


def run_box(row: Row, run: IndexRun, rows: tuple[int, int] | None = None) -> Box:
    """Return the box of a run in its HF tensor; of its rows [first, end) only, if given."""
    shape = row.shapes[run.part]
    first = [run.start if dim == row.dim else 0 for dim in range(len(shape))]
    if rows is not None:
        first[0] = rows[0]
    return tuple(first), box_shape(shape, row.dim, run.length, rows)


@lru_cache(maxsize=1 << 16)
def piece_bytes(row: Row, portion: Portion, num_shards: int, encoding: Encoding) -> IntArray:
    """Return the bytes of a portion of every engine shard of a row. Shapes: int64 [num_shards]."""
    return np.array(
        [
            sum(
                encoding.num_bytes(*run_box(row, cut(run, portion, encoding.step)))
                for run in runs_of(row, Portion(shard, num_shards))
            )
            for shard in range(num_shards)
        ]
    )


@lru_cache(maxsize=1 << 12)
def _num_pieces(row: Row, num_shards: int, encoding: Encoding, bucket_bytes: int) -> int:
    """Return the smallest number of equal pieces that fit in a bucket.

    Raises: LayoutError if the smallest piece, one index or one row or column of blocks, does not fit.
    """
    step = encoding.step
    # By shard: the steps of each run, and the bytes of one step.
    runs = {
        tuple(
            (
                -(-run.length // step),
                encoding.num_bytes(*run_box(row, run._replace(start=0, length=min(step, run.length)))),
            )
            for run in runs_of(row, Portion(shard, num_shards))
        )
        for shard in range(num_shards)
    }
    # A lower bound: cutting rounds each run of a shard up to whole steps, which may need further pieces.
    num_pieces = max(-(-sum(length * size for length, size in run) // bucket_bytes) for run in runs)
    longest = max(length for run in runs for length, _ in run)
    while any(sum(-(-length // num_pieces) * size for length, size in run) > bucket_bytes for run in runs):
        if num_pieces >= longest:
            least, what = max(sum(size for _, size in run) for run in runs), "index" if step == 1 else "block"
            raise LayoutError(
                f"one {what} of dim {row.dim} of {', '.join(row.hf)} exceeds {bucket_bytes} bytes: it takes {least}"
            )
        num_pieces += 1
    return num_pieces


def _padded(num_rows: int) -> int:
    return -(-num_rows // VOCABULARY_PADDING) * VOCABULARY_PADDING
