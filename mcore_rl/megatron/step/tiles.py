"""Tiles of the logits of an output projection: some tokens x part of the vocabulary.

Each tensor-parallel rank has a shard of the vocabulary. The softmax, its sums and its gradients are computed tile by
tile (logprobs.py, reverse_kl.py, score_norms.py), so that the logits of all tokens never exist at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from mcore_rl.megatron.step.kept_tokens import DROPPED, MASK_PADDING, KeptTokens, SetGroup

TILE_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 25}
"""Number of logits in a tile, by device. On a CPU, a tile and its exponentials stay in the shared cache, so elementwise
passes are cheap compared to the matrix product. On a GPU, two float32 tiles take 256 MiB."""
MASK_IN_PRODUCT = {"cpu": True, "cuda": False}
"""True: the mask of a tile is the summand of the matrix product, written as logits. On a CPU this is faster than
masked_fill (0.6 ns per logit instead of 6). On a GPU a mask of 1 byte per logit takes less bandwidth."""


@dataclass(frozen=True)
class Options:
    """Options of linear_logp_entropy, with the temperature in the dtype of the logits."""

    temperature: float | torch.Tensor
    chunk_tokens: int
    group: dist.ProcessGroup | None
    compute_entropy: bool
    vocab_size: int | None
    kept: KeptTokens | None
    float32_head: bool = False

    def first_entry(self, weight: torch.Tensor) -> int:
        """Return the token id of the first row of the shard."""
        return 0 if self.group is None else dist.get_rank(self.group) * weight.shape[0]

    def num_entries(self, weight: torch.Tensor) -> int:
        """Number of rows of the shard before the padding."""
        if self.vocab_size is None:
            return weight.shape[0]
        return max(min(self.vocab_size - self.first_entry(weight), weight.shape[0]), 0)


@dataclass(frozen=True)
class Tile:
    """A tile of the logits: tokens `rows` x `columns`, which are local vocabulary entries or, in a group of kept
    tokens, columns of the group.

    weight: rows of the projection for the columns. entries: local vocabulary entries of the columns; None if they are
    the same. masked: logits of some entries are DROPPED.
    Shapes: weight [w, h]; entries int64 [w], ascending.
    """

    rows: slice
    columns: slice
    first_column: bool
    weight: torch.Tensor
    entries: torch.Tensor | None = None
    masked: bool = False

    def exp(self, log_ratios: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Compute exp of logits relative to a maximum or a log-sum-exp, exactly 0 for DROPPED logits. May lower
        log_ratios where the result is 0."""
        if not self.masked or log_ratios.is_cuda:
            return torch.exp(log_ratios, out=out)
        # On a CPU, exp of a number that underflows takes 40 times as long.
        lowest = math.log(torch.finfo(log_ratios.dtype).tiny) + 0.5
        torch.exp(log_ratios.clamp_min_(lowest), out=out)
        return torch.nn.functional.threshold_(out, math.exp(lowest + 0.2), 0.0)

    def add_weight_gradient(
        self, total: torch.Tensor, grad_logits: torch.Tensor, hidden: torch.Tensor, *, float32_head: bool
    ) -> None:
        """Add the gradient of the projection's rows to `total`, in place. `float32_head`: see accumulate_product.

        Shapes: total [V, h]; hidden [n, h].
        """
        if self.entries is None:
            accumulate_product(total[self.columns], grad_logits.t(), hidden, float32_head=float32_head)
            return
        part = torch.zeros(self.weight.shape, dtype=total.dtype, device=total.device)
        accumulate_product(part, grad_logits.t(), hidden, float32_head=float32_head)
        total.index_add_(0, self.entries, part)  # deterministic: the entries are distinct


@dataclass(frozen=True)
class Projection:
    """Output projection of a model on one tensor-parallel rank, with the options of linear_logp_entropy.

    float32_head: see accumulate_product.

    Shapes: weight [V, h], the rank's rows; temperature: a number or [T].
    """

    weight: torch.Tensor
    temperature: float | torch.Tensor = 1.0
    chunk_tokens: int = 1024
    group: dist.ProcessGroup | None = None
    vocab_size: int | None = None
    float32_head: bool = False

    def of_tokens(self, tokens: torch.Tensor | None) -> Projection:
        """Return the projection for some of the T tokens (indices; None: all)."""
        if tokens is None or not isinstance(self.temperature, torch.Tensor):
            return self
        return replace(self, temperature=self.temperature[tokens])

    def options(self, hidden: torch.Tensor) -> Options:
        """Return the options of its tiles, without entropy and sets."""
        temperature = self.temperature
        if isinstance(temperature, torch.Tensor):
            temperature = temperature.detach().to(compute_dtype(hidden))
        return Options(temperature, self.chunk_tokens, self.group, False, self.vocab_size, None, self.float32_head)

    def reduce(self, tensor: torch.Tensor, *, largest: bool = False) -> None:
        """Add a tensor over the ranks of the group, in place, or take the largest value."""
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)


def tiles(hidden: torch.Tensor, weight: torch.Tensor, options: Options) -> Iterator[tuple[Tile, torch.Tensor]]:
    """Yield every tile with its scaled logits. The consumer may overwrite them; the next tile reuses the memory.

    With options.kept, `hidden` and a temperature per token are in the order of its groups.
    """
    first, count = options.first_entry(weight), options.num_entries(weight)
    if options.kept is None:
        yield from _tiles_of(slice(0, len(hidden)), slice(0, count), None, hidden, weight, options)
        return
    for group in options.kept.groups:
        yield from _tiles_of(group.rows, group.columns(first, count), group, hidden, weight, options)


def _tiles_of(
    tokens: slice, columns: slice, group: SetGroup | None, hidden: torch.Tensor, weight: torch.Tensor, options: Options
) -> Iterator[tuple[Tile, torch.Tensor]]:
    """Yield the tiles of tokens with the same columns."""
    chunk, first_entry = min(options.chunk_tokens, tokens.stop - tokens.start), options.first_entry(weight)
    if chunk == 0 or columns.start >= columns.stop:
        return
    ids = None if group is None else group.ids
    elements = TILE_ELEMENTS.get(hidden.device.type, TILE_ELEMENTS["cuda"])
    # The weights of listed columns are copied: at most as many elements as a tile has logits.
    width = max(elements // (chunk if ids is None else max(chunk, weight.shape[1])), 1)
    width = min(width, columns.stop - columns.start)
    mask = None if group is None or group.bits is None else _TileMask(group, 0 if ids is not None else first_entry)
    buffer = torch.empty(chunk * (width + MASK_PADDING), dtype=compute_dtype(hidden), device=hidden.device)
    for first in range(tokens.start, tokens.stop, chunk):
        rows = slice(first, min(first + chunk, tokens.stop))
        for column in range(columns.start, columns.stop, width):
            some = slice(column, min(column + width, columns.stop))
            entries = None if ids is None else ids[some] - first_entry
            part = weight[some] if entries is None else weight.index_select(0, entries)
            tile = Tile(rows, some, column == columns.start, part, entries, mask is not None)
            yield tile, _logits(tile, hidden[rows], options.temperature, mask, buffer)


@dataclass(frozen=True)
class _TileMask:
    """Masks of the tiles of a group. first_column: number of columns of the group before column 0 of the tiles."""

    group: SetGroup
    first_column: int

    def unpack(self, tile: Tile, buffer: torch.Tensor) -> torch.Tensor:
        start = self.group.rows.start
        tokens = slice(tile.rows.start - start, tile.rows.stop - start)
        begin, end = (self.first_column + column for column in (tile.columns.start, tile.columns.stop))
        return self.group.unpack(tokens, begin, end, buffer)


def _logits(
    tile: Tile, hidden: torch.Tensor, temperature: float | torch.Tensor, mask: _TileMask | None, buffer: torch.Tensor
) -> torch.Tensor:
    """Compute the scaled logits of a tile in the memory of `buffer`, with the mask."""
    per_token = isinstance(temperature, torch.Tensor)
    scale = 1.0 if per_token else 1.0 / temperature
    shape = len(hidden), tile.columns.stop - tile.columns.start
    in_product = mask is not None and MASK_IN_PRODUCT[buffer.device.type]
    logits = buffer[: shape[0] * shape[1]].view(shape) if mask is None or not in_product else mask.unpack(tile, buffer)
    _product(logits, hidden, tile.weight.t(), scale, beta=float(in_product))
    if mask is not None and not in_product:
        dropped = mask.unpack(tile, torch.empty(len(buffer), dtype=torch.bool, device=buffer.device))
        logits.masked_fill_(dropped, DROPPED)
    if isinstance(temperature, torch.Tensor):
        logits.div_(temperature[tile.rows, None])
    return logits


def targets_in_tile(local_targets: torch.Tensor, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each row's target, clamped to the tile, [n, 1], and True if it is inside the tile, [n]."""
    targets, width = local_targets[tile.rows], tile.columns.stop - tile.columns.start
    if tile.entries is not None:
        column = torch.searchsorted(tile.entries, targets).clamp_(max=width - 1)
        return column[:, None], tile.entries[column] == targets
    column = targets - tile.columns.start
    return column.clamp(0, width - 1)[:, None], (column >= 0) & (column < width)


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of logits and sums."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float, *, beta: float) -> None:
    """Compute out = beta * out + scale * left @ right with at least float32 accumulation, also for bfloat16."""
    if left.is_cuda and left.dtype == right.dtype != out.dtype:
        assert beta == 0.0
        torch.mm(left, right, out_dtype=out.dtype, out=out)
        if scale != 1.0:
            out.mul_(scale)
    else:
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=beta, alpha=scale, out=out)


def accumulate_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, float32_head: bool) -> None:
    """Add left @ right to total in place. left, a gradient of logits, has the dtype of total; right, the weight or the
    hidden states, has the dtype of the model.

    float32_head: on GPUs, multiply in float32, for which `right` is converted. Otherwise the gradient of the logits is
    rounded to the model's dtype there.
    """
    if total.is_cuda and right.dtype != total.dtype and not float32_head:
        # Use tensor cores. An unfused projection also rounds the gradient of the logits to the model's dtype.
        total.add_(torch.mm(left.to(right.dtype), right, out_dtype=total.dtype))
    else:
        total.addmm_(left, right.to(total.dtype))
