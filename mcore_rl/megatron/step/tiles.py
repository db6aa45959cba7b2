"""Tiles of the logits of an output projection: some tokens x part of the vocabulary.

Each tensor-parallel rank has a shard of the vocabulary. The softmax, its sums and its gradients are computed tile by
tile (logprobs.py, reverse_kl.py, score_norms.py), so that the logits of all tokens never exist at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mcore_rl.megatron.step.kept_tokens import KeptTokens

TILE_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 25}
"""Number of logits in a tile, by device. On a CPU, a tile and its exponentials stay in the shared cache, so elementwise
passes are cheap compared to the matrix product. On a GPU, two float32 tiles take 256 MiB."""
DROPPED = -1e30
"""Logit of an entry outside the set. exp(DROPPED - m) is exactly 0 for every maximum m of real logits. Its product with
the number of entries is finite in float32; with -inf or the smallest number it would not be, and the sums of a tile
without any entry of a set would become NaN when they are rescaled."""


@dataclass(frozen=True)
class Options:
    """Options of linear_logp_entropy, with the temperature in the dtype of the logits."""

    temperature: float | torch.Tensor
    chunk_tokens: int
    group: dist.ProcessGroup | None
    compute_entropy: bool
    vocab_size: int | None
    kept: KeptTokens | None

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
    """A tile of the logits: tokens `rows` x local vocabulary entries `columns`."""

    rows: slice
    columns: slice
    first_column: bool
    dropped: torch.Tensor | None = None

    def clear(self, values: torch.Tensor) -> torch.Tensor:
        """Set the entries outside the sets to 0 in place. Before exp, too: on a CPU, exp of a number that underflows
        takes 50 times as long."""
        return values if self.dropped is None else values.masked_fill_(self.dropped, 0.0)


@dataclass(frozen=True)
class Projection:
    """Output projection of a model on one tensor-parallel rank, with the options of linear_logp_entropy.

    Shapes: weight [V, h], the rank's rows; temperature: a number or [T].
    """

    weight: torch.Tensor
    temperature: float | torch.Tensor = 1.0
    chunk_tokens: int = 1024
    group: dist.ProcessGroup | None = None
    vocab_size: int | None = None

    def options(self, hidden: torch.Tensor) -> Options:
        """Return the options of its tiles, without entropy and sets."""
        temperature = self.temperature
        if isinstance(temperature, torch.Tensor):
            temperature = temperature.detach().to(compute_dtype(hidden))
        return Options(temperature, self.chunk_tokens, self.group, False, self.vocab_size, None)

    def reduce(self, tensor: torch.Tensor, *, largest: bool = False) -> None:
        """Add a tensor over the ranks of the group, in place, or take the largest value."""
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)


def tiles(hidden: torch.Tensor, weight: torch.Tensor, options: Options) -> Iterator[tuple[Tile, torch.Tensor]]:
    """Yield every tile with its scaled logits. The consumer may overwrite them; the next tile reuses the memory."""
    num_tokens, num_entries = hidden.shape[0], options.num_entries(weight)
    chunk = min(options.chunk_tokens, num_tokens)
    if chunk == 0 or num_entries == 0:
        return
    elements = TILE_ELEMENTS.get(hidden.device.type, TILE_ELEMENTS["cuda"])
    width = min(num_entries, max(elements // chunk, 1))
    buffer = torch.empty(chunk * width, dtype=compute_dtype(hidden), device=hidden.device)
    for first in range(0, num_tokens, chunk):
        rows = slice(first, min(first + chunk, num_tokens))
        dropped = None
        if options.kept is not None:
            dropped = options.kept.dropped(rows, options.first_entry(weight), num_entries)
        for entry in range(0, num_entries, width):
            columns = slice(entry, min(entry + width, num_entries))
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            logits = buffer[: shape[0] * shape[1]].view(shape)
            if isinstance(options.temperature, torch.Tensor):
                _product(logits, hidden[rows], weight[columns].t(), 1.0)
                logits.div_(options.temperature[rows, None])
            else:
                _product(logits, hidden[rows], weight[columns].t(), 1.0 / options.temperature)
            if dropped is not None:
                logits.masked_fill_(dropped[:, columns], DROPPED)
            yield Tile(rows, columns, entry == 0, None if dropped is None else dropped[:, columns]), logits


def targets_in_tile(local_targets: torch.Tensor, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each row's target, clamped to the tile, [n, 1], and True if it is inside the tile, [n]."""
    column = local_targets[tile.rows] - tile.columns.start
    width = tile.columns.stop - tile.columns.start
    return column.clamp(0, width - 1)[:, None], (column >= 0) & (column < width)


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of logits and sums."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    """Compute out = scale * left @ right with at least float32 accumulation, also for bfloat16 operands."""
    if left.dtype == out.dtype == right.dtype:
        torch.addmm(out, left, right, beta=0.0, alpha=scale, out=out)
    elif left.is_cuda and left.dtype == right.dtype:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
        if scale != 1.0:
            out.mul_(scale)
    else:
        torch.addmm(out, left.to(out.dtype), right.to(out.dtype), beta=0.0, alpha=scale, out=out)


def accumulate_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to total in place. left has the dtype of total; right has the dtype of the model."""
    if total.is_cuda and right.dtype != total.dtype:
        # Use tensor cores. An unfused projection also rounds the gradient of the logits to the model's dtype.
        total.add_(torch.mm(left.to(right.dtype), right, out_dtype=total.dtype))
    else:
        total.addmm_(left, right.to(total.dtype))
