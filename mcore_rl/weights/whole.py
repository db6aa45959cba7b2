"""Whole HF tensors on trainer ranks, for engines that come for their slices themselves: what tensor parallelism has
divided is put together, what pipeline and expert parallelism have dealt out stays where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch

from mcore_rl.errors import WeightSyncError
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement, segments_of
from model_converters.mapping.table import BoundRow

Gather = Callable[[torch.Tensor, bool], list[torch.Tensor]]
"""The tensor's shards on all ranks that share it, in their order: those of the tensor-parallel group, or (True) of the
expert-tensor-parallel one. Collective over these."""


class WholeTensors:
    """Of the rows that engines take, on one rank. Ranks that share a tensor ask for it in the same order."""

    def __init__(self, rows: Sequence[BoundRow], layout: TrainLayout, rank: int, gather: Gather) -> None:
        self._rows = rows
        self._gather = gather
        self._num_shards: dict[str, int] = {}
        self._row_of: dict[str, BoundRow] = {}
        placement, at = Placement(rows, layout), layout.coordinates(rank)
        for bound in rows:
            self._row_of |= dict.fromkeys(bound.hf, bound)
            if (place := placement.shard_at(bound, at)) is not None:
                self._num_shards |= dict.fromkeys(bound.hf, place[1])
        self._assembled: tuple[str, dict[str, torch.Tensor]] = ("", {})

    @cached_property
    def specs(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, type and shape of every tensor of the model, on whatever rank it is."""
        return [
            (name, bound.dtype, tuple(bound.row.shapes[part]))
            for bound in self._rows
            for part, name in enumerate(bound.hf)
        ]

    @property
    def held(self) -> set[str]:
        """Names of those that this rank can give, alone or with those that share them."""
        return set(self._num_shards)

    def of(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A tensor that is held; a view where the rank has all of it in one piece. Collective over those that share it,
        with the first name of its row; `tensors` by canonical mcore name.

        Raises: WeightSyncError where this rank does not have what the layout says.
        """
        bound = self._row_of[name]
        row, part = bound.row, bound.hf.index(name)
        if bound.mcore not in tensors:
            raise WeightSyncError(f"this rank has no {bound.mcore}, of which it is to give {name}")
        num_shards, shape = self._num_shards[name], row.shapes[part]
        if not shape:
            return tensors[bound.mcore].to(bound.dtype)
        mine = [each for each in segments_of(row, 0, 1) if each.part == part]
        if num_shards == 1 and len(mine) == 1:
            return tensors[bound.mcore].narrow(row.dim, mine[0].local_start, mine[0].length).to(bound.dtype)
        return self._parts(bound, tensors)[name]

    def _parts(self, bound: BoundRow, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All HF tensors of a row, which are asked for one after the other."""
        if self._assembled[0] == bound.hf[0]:
            return self._assembled[1]
        row, num_shards = bound.row, self._num_shards[bound.hf[0]]
        own = tensors[bound.mcore]
        shards = [own] if num_shards == 1 else self._gather(own.contiguous(), bound.expert is not None)
        whole = [own.new_empty(shape, dtype=bound.dtype) for shape in row.shapes]
        for index, shard in enumerate(shards):
            for part, start, local_start, length in segments_of(row, index, num_shards):
                whole[part].narrow(row.dim, start, length).copy_(shard.narrow(row.dim, local_start, length))
        self._assembled = bound.hf[0], dict(zip(bound.hf, whole, strict=True))
        return self._assembled[1]

    def forget(self) -> None:
        """Lets go of what was put together last: weights change."""
        self._assembled = ("", {})
