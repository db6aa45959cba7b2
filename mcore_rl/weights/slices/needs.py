"""What a rank of an inference engine takes of every HF tensor, computed from the weight table without an engine.

A rank takes one run of indices of a tensor, along the dimension that the trainer divides too, and all of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mcore_rl.weights.slices.engine_layout import EngineLayout
from model_converters.errors import LayoutError
from model_converters.mapping.table import FINAL_NORM, BoundRow, Row
from model_converters.mapping.transforms import GroupedQKV, Shape, Vocabulary

VOCABULARY_PADDING = 64
"""Rows that vLLM pads a vocabulary to a multiple of, before it divides it."""

Ranks = npt.NDArray[np.int64]
Box = tuple[Shape, Shape]
"""Indices of the first element of a part of a tensor, and the part's shape."""


class Nth(NamedTuple):
    """Part `number` of `of` parts of something, the first being 0."""

    number: int
    of: int


WHOLE = Nth(0, 1)


class Need(NamedTuple):
    """A run of indices of HF part `part`, along the row's dim."""

    part: int
    start: int
    length: int


@dataclass(frozen=True, eq=False)
class Takers:
    """The ranks of an engine that take a tensor, and which of `num_shards` shards each takes."""

    ranks: Ranks
    shards: Ranks
    num_shards: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of what every taker needs of a row, which is cut where it exceeds a bucket."""

    bound: BoundRow
    piece: Nth = WHOLE


class Needs:
    """Answers, for one table and one layout of the engine, who takes what.

    Raises: LayoutError listing everything that the engine's ranks do not divide.
    """

    def __init__(self, rows: Sequence[BoundRow], layout: EngineLayout) -> None:
        self.layout = layout
        self.rows = [bound for bound in rows if not bound.row.copy_of_embedding and bound.row.place != "mtp"]
        """Those of which an engine takes anything: it drafts with no multi-token prediction, and ties heads itself."""
        self._tied = any(bound.row.copy_of_embedding for bound in rows)
        num_layers = 1 + max((bound.layer for bound in self.rows if bound.layer is not None), default=-1)
        stages = layout.stage_layers(num_layers) if num_layers else []
        self._stage_of_layer = [stage for stage, layers in enumerate(stages) for _ in layers]
        self._takers: dict[tuple[tuple[int, ...], str, int], Takers] = {}
        self._check({id(bound.row): bound.row for bound in self.rows}.values())

    def takers(self, bound: BoundRow) -> Takers:
        """Who takes the tensors of this row; the same object for all rows that are dealt alike."""
        owner = -1
        how = "whole" if bound.row.axis == "none" else "divided"
        if bound.expert is not None:
            how = "owned" if self.layout.expert_parallel else "experts"
            owner = self.owner(bound) if self.layout.expert_parallel else -1
        key = (self._stages(bound), how, owner)
        if key not in self._takers:
            self._takers[key] = self._deal(*key)
        return self._takers[key]

    def owner(self, bound: BoundRow) -> int:
        """Expert-parallel rank that has the expert: the first ones have one more where they do not divide.

        Source: vllm's determine_expert_map, "linear" (0.32).
        """
        assert bound.expert is not None
        each, rest = divmod(bound.row.num_experts, self.layout.expert_ranks)
        larger = rest * (each + 1)
        if bound.expert < larger:
            return bound.expert // (each + 1)
        return rest + (bound.expert - larger) // each

    def boxes(self, rank: int) -> dict[str, Box]:
        """What a rank of the engine takes, by HF name."""
        boxes = {}
        for bound in self.rows:
            takers = self.takers(bound)
            for shard in takers.shards[takers.ranks == rank].tolist():
                for part, start, length in needs_of(bound.row, Nth(shard, takers.num_shards)):
                    shape, dim = bound.row.shapes[part], bound.row.dim
                    first = tuple(start if axis == dim else 0 for axis in range(len(shape)))
                    size = (*shape[:dim], length, *shape[dim + 1 :]) if shape else ()
                    boxes[bound.hf[part]] = (first, size)
        return boxes

    def chunks(self, bucket_bytes: int) -> Iterator[tuple[int, Chunk]]:
        """All chunks with their bucket, in the order in which they travel; of one bucket no rank takes more than
        bucket_bytes.

        Raises: LayoutError where one index of a tensor is larger than a bucket.
        """
        bucket, used = 0, np.zeros(self.layout.num_ranks, np.int64)
        for bound in self._in_order():
            takers = self.takers(bound)
            num_pieces = _num_pieces(bound.row, takers.num_shards, bound.dtype.itemsize, bucket_bytes)
            for piece in (Nth(number, num_pieces) for number in range(num_pieces)):
                sizes = chunk_bytes(bound.row, piece, takers.num_shards, bound.dtype.itemsize)
                taken = sizes[takers.shards]
                if int((used[takers.ranks] + taken).max()) > bucket_bytes:
                    bucket, used = bucket + 1, np.zeros_like(used)
                used[takers.ranks] += taken
                yield bucket, Chunk(bound, piece)

    def _in_order(self) -> list[BoundRow]:
        """The first layer of every stage, tensor by tensor, then the second of each; of whole experts the first of
        every owner comes first: no bucket is a few ranks' alone."""
        turns, counts = [], dict.fromkeys((bound.group for bound in self.rows), 0)
        for bound in self.rows:
            counts[bound.group] += 1
            turns.append((self._layer_of_stage(bound), self._expert_of_owner(bound), counts[bound.group]))
        order = sorted(range(len(turns)), key=turns.__getitem__)
        return [self.rows[index] for index in order]

    def _layer_of_stage(self, bound: BoundRow) -> int:
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
        if bound.mcore == FINAL_NORM or bound.row.place == "head":
            return (last,)
        return (0, last) if self._tied and last else (0,)

    def _deal(self, stages: tuple[int, ...], how: str, owner: int) -> Takers:
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
        return Takers(np.array(ranks), np.array(shards), num_shards)

    def _check(self, rows: Iterable[Row]) -> None:
        problems = set()
        for row in rows:
            experts = row.num_experts > 0
            if experts and self.layout.expert_parallel:
                if row.num_experts < self.layout.expert_ranks:
                    problems.add(
                        f"{row.num_experts} experts are fewer than the engine's {self.layout.expert_ranks} ranks"
                    )
                continue
            size = self.layout.expert_ranks if experts else self.layout.tp
            axis = "the engine's tp"
            refusal = _refusal(row, size) if size > 1 and row.axis != "none" else ""
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
        heads = row.shapes[0][row.dim] * groups // row.shapes[1][row.dim]
        if num_shards % groups:
            return f"{groups} is neither a multiple nor a divisor of {{axis}} {num_shards}"
        return f"{heads} is not a multiple of {{axis}} {num_shards}" if heads % num_shards else ""
    return row.transform.refusal(row.shapes, row.dim, num_shards)


@lru_cache(maxsize=1 << 16)
def needs_of(row: Row, taker: Nth) -> tuple[Need, ...]:
    """What a shard of an engine is made of; of every HF part one run at most."""
    shard, num_shards = taker
    if not row.shapes[0]:
        return (Need(0, 0, 1),)
    lengths = [shape[row.dim] for shape in row.shapes]
    if num_shards == 1:
        return tuple(Need(part, 0, length) for part, length in enumerate(lengths))
    if isinstance(row.transform, Vocabulary):
        each = _padded(lengths[0]) // num_shards
        real = min(lengths[0] - shard * each, each)
        return (Need(0, shard * each, real),) if real > 0 else ()
    needs = [Need(part, shard * length // num_shards, length // num_shards) for part, length in enumerate(lengths)]
    if isinstance(row.transform, GroupedQKV) and num_shards > row.transform.num_groups:
        # Fewer key-value heads than ranks: each has one whole, and num_shards / groups neighbours the same.
        groups = row.transform.num_groups
        group = shard * groups // num_shards
        needs[1:] = [Need(part, group * lengths[part] // groups, lengths[part] // groups) for part in (1, 2)]
    return tuple(needs)


def cut(need: Need, piece: Nth) -> Need:
    """A piece of a run."""
    first = need.length * piece.number // piece.of
    end = need.length * (piece.number + 1) // piece.of
    return Need(need.part, need.start + first, end - first)


def index_bytes(row: Row, part: int, element_bytes: int) -> int:
    """Bytes of one index of the row's dim of an HF part."""
    shape = row.shapes[part]
    return prod(shape[: row.dim] + shape[row.dim + 1 :]) * element_bytes if shape else element_bytes


@lru_cache(maxsize=1 << 16)
def chunk_bytes(row: Row, piece: Nth, num_shards: int, element_bytes: int) -> Ranks:
    """Bytes of a piece of a row, by shard of the engine."""
    return np.array(
        [
            sum(
                cut(need, piece).length * index_bytes(row, need.part, element_bytes)
                for need in needs_of(row, Nth(shard, num_shards))
            )
            for shard in range(num_shards)
        ]
    )


@lru_cache(maxsize=1 << 12)
def _num_pieces(row: Row, num_shards: int, element_bytes: int, bucket_bytes: int) -> int:
    """The least number of pieces of which each fits a bucket.

    Raises: LayoutError where single indices do not.
    """
    runs = {
        tuple(
            (need.length, index_bytes(row, need.part, element_bytes)) for need in needs_of(row, Nth(shard, num_shards))
        )
        for shard in range(num_shards)
    }
    num_pieces = max(-(-sum(length * size for length, size in run) // bucket_bytes) for run in runs)
    longest = max(length for run in runs for length, _ in run)
    while any(sum(-(-length // num_pieces) * size for length, size in run) > bucket_bytes for run in runs):
        if num_pieces >= longest:
            least = max(sum(size for _, size in run) for run in runs)
            raise LayoutError(
                f"one index of dim {row.dim} of {', '.join(row.hf)} exceeds {bucket_bytes} bytes: it takes {least}"
            )
        num_pieces += 1
    return num_pieces


def _padded(num_rows: int) -> int:
    return -(-num_rows // VOCABULARY_PADDING) * VOCABULARY_PADDING
