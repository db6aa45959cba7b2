"""Log-probabilities and entropies of given tokens from hidden states, without materializing all logits.

The output projection is fused with the softmax: logits exist for one tile (some tokens x part of the vocabulary) at a
time and are recomputed in the backward pass. Each tensor-parallel rank reduces its own vocabulary shard; the ranks then
exchange only per-token statistics, with one MAX and one SUM all-reduce per call for any number of tiles.

With `kept`, the softmax of each token is normalized over its own set of entries ("keep sampling mask", DeepSeek-V3.2,
arXiv 2512.02556): the logits of all others become DROPPED before the reduction, so that their probability and their
gradient are exactly 0. A rank whose shard has no entry of a token's set contributes nothing to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

from mcore_rl.megatron.step.kept_tokens import KeptTokens

TILE_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 25}
"""Number of logits in a tile, by device. On a CPU, a tile and its exponentials stay in the shared cache, so elementwise
passes are cheap compared to the matrix product. On a GPU, two float32 tiles take 256 MiB."""
DROPPED = -1e30
"""Logit of an entry outside the set. exp(DROPPED - m) is exactly 0 for every maximum m of real logits. Its product with
the number of entries is finite in float32, unlike that of -inf or of the smallest number, so sums of a tile without
any entry of a set vanish when they are rescaled instead of becoming NaN."""


def linear_logp_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    chunk_tokens: int = 1024,
    group: dist.ProcessGroup | None = None,
    compute_entropy: bool = True,
    vocab_size: int | None = None,
    kept: KeptTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log softmax(hidden weight^T / temperature) at the targets, and the entropy of the distribution.

    Both results are differentiable in hidden and weight. The gradient of hidden is this rank's partial sum; the caller
    must reduce it over the group. Vocabulary rows from vocab_size on are padding: excluded, with zero gradient. Without
    compute_entropy the entropy is zero.

    kept: set of entries of each token; the softmax, its entropy and their gradients cover the set only. It must contain
    the token's target. None: the whole vocabulary.

    Shapes: hidden [T, h]; weight [V, h], this rank's rows of the vocabulary; targets int64 [T], global token ids;
    temperature: a number or [T], without gradient; results float32 [T] (float64 for float64 inputs). At most
    chunk_tokens rows of logits exist at a time.
    Units: nats.
    Collective: all ranks of `group` (None: weight is the whole vocabulary), with equal hidden and targets.
    """
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.detach().to(_compute_dtype(hidden))
    if kept is not None and len(kept) != len(hidden):
        raise ValueError(f"{len(kept)} sets of kept entries for {len(hidden)} tokens")
    return _LinearLogpEntropy.apply(
        hidden, weight, targets, _Options(temperature, chunk_tokens, group, compute_entropy, vocab_size, kept)
    )


@dataclass(frozen=True)
class _Options:
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
class _Tile:
    """A tile of the logits: tokens `rows` x local vocabulary entries `columns`."""

    rows: slice
    columns: slice
    first_column: bool
    dropped: torch.Tensor | None = None

    def clear(self, values: torch.Tensor) -> torch.Tensor:
        """Set the entries outside the sets to 0 in place. Before exp, too: on a CPU, exp of a number that underflows
        takes 50 times as long."""
        return values if self.dropped is None else values.masked_fill_(self.dropped, 0.0)


class _LinearLogpEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, options: _Options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        local_targets = targets - options.first_entry(weight)
        statistics = _local_statistics(hidden, weight, local_targets, options)
        # Only per-token statistics are saved for the backward pass, no logits.
        log_sum, target_logit, entropy = _reduce_statistics(statistics, options)
        ctx.save_for_backward(hidden, weight, local_targets, log_sum, entropy)
        ctx.options = options
        ctx.set_materialize_grads(False)
        if not options.compute_entropy:
            ctx.mark_non_differentiable(entropy)
        return target_logit - log_sum, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_logp: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden, weight, local_targets, log_sum, entropy = ctx.saved_tensors
        if not ctx.options.compute_entropy:
            grad_entropy = None
        if grad_logp is None and grad_entropy is None:
            return None, None, None, None
        slope, offset = _softmax_coefficients(grad_logp, grad_entropy, entropy, ctx.options.temperature)
        at_target = None if grad_logp is None else grad_logp / ctx.options.temperature
        dtype = log_sum.dtype
        grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if ctx.needs_input_grad[1] else None
        # Recompute the logits tile by tile; the tile's memory is reused for the gradient of its logits.
        for tile, logits in _tiles(hidden, weight, ctx.options):
            rows = tile.rows
            grad_logits = _softmax_gradient(
                tile.clear(logits.sub_(log_sum[rows, None])), None if slope is None else slope[rows], offset[rows]
            )
            tile.clear(grad_logits)
            if at_target is not None:
                index, inside = _targets_in_tile(local_targets, tile)
                grad_logits.scatter_add_(1, index, (at_target[rows] * inside)[:, None])
            if grad_hidden is not None:
                _accumulate_product(grad_hidden[rows], grad_logits, weight[tile.columns])
            if grad_weight is not None:
                _accumulate_product(grad_weight[tile.columns], grad_logits.t(), hidden[rows])
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
        )


def _tiles(hidden: torch.Tensor, weight: torch.Tensor, options: _Options) -> Iterator[tuple[_Tile, torch.Tensor]]:
    """Yield every tile with its scaled logits. The consumer may overwrite them; the next tile reuses the memory."""
    num_tokens, num_entries = hidden.shape[0], options.num_entries(weight)
    chunk = min(options.chunk_tokens, num_tokens)
    if chunk == 0 or num_entries == 0:
        return
    elements = TILE_ELEMENTS.get(hidden.device.type, TILE_ELEMENTS["cuda"])
    width = min(num_entries, max(elements // chunk, 1))
    buffer = torch.empty(chunk * width, dtype=_compute_dtype(hidden), device=hidden.device)
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
            yield _Tile(rows, columns, entry == 0, None if dropped is None else dropped[:, columns]), logits


def _local_statistics(
    hidden: torch.Tensor, weight: torch.Tensor, local_targets: torch.Tensor, options: _Options
) -> torch.Tensor:
    """Compute online-softmax statistics over this rank's vocabulary: [4, T], in its rows: maximum m, sum exp(z - m),
    sum exp(z - m) (z - m), and the target's logit (0 if another rank holds it)."""
    statistics = torch.zeros((4, hidden.shape[0]), dtype=_compute_dtype(hidden), device=hidden.device)
    if options.num_entries(weight) == 0:
        statistics[0] = torch.finfo(statistics.dtype).min / 2  # below every logit; -inf would give -inf * 0 = nan
    scratch: torch.Tensor | None = None
    for tile, logits in _tiles(hidden, weight, options):
        maximum, total, weighted, target_logit = (row[tile.rows] for row in statistics)
        index, inside = _targets_in_tile(local_targets, tile)
        target_logit += logits.gather(1, index).squeeze(1) * inside
        new_maximum = logits.amax(1)
        if not tile.first_column:
            new_maximum = torch.maximum(new_maximum, maximum)
            _shift(maximum, total, weighted, new_maximum)
        maximum.copy_(new_maximum)
        tile.clear(logits.sub_(new_maximum[:, None]))
        if options.compute_entropy:
            if scratch is None:
                scratch = torch.empty(logits.numel(), dtype=logits.dtype, device=logits.device)
            exponentials = tile.clear(torch.exp(logits, out=scratch[: logits.numel()].view(logits.shape)))
            weighted += logits.mul_(exponentials).sum(1)
        else:
            exponentials = tile.clear(logits.exp_())
        total += exponentials.sum(1)
    return statistics


def _shift(old: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor, new: torch.Tensor) -> None:
    """Rescale the two sums in place from maximum `old` to `new`."""
    factor = torch.exp(old - new)
    weighted.add_(total * (old - new)).mul_(factor)
    total.mul_(factor)


def _reduce_statistics(statistics: torch.Tensor, options: _Options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine the statistics of all ranks. Returns log-sum-exp, target logit and entropy, each [T]."""
    maximum, total, weighted, target_logit = statistics
    if options.group is not None and dist.get_world_size(options.group) > 1:
        # Rescale the local sums to the global maximum; then all ranks' sums can be added.
        local_maximum = maximum.clone()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=options.group)
        _shift(local_maximum, total, weighted, maximum)
        dist.all_reduce(statistics[1:], group=options.group)
    log_total = torch.log(total)
    entropy = log_total - weighted / total if options.compute_entropy else torch.zeros_like(total)
    return maximum + log_total, target_logit, entropy


def _targets_in_tile(local_targets: torch.Tensor, tile: _Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each row's target, clamped to the tile, [n, 1], and True if it is inside the tile, [n]."""
    column = local_targets[tile.rows] - tile.columns.start
    width = tile.columns.stop - tile.columns.start
    return column.clamp(0, width - 1)[:, None], (column >= 0) & (column < width)


def _softmax_coefficients(
    grad_logp: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    entropy: torch.Tensor,
    temperature: float | torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Compute slope and offset of a logit's gradient, p (slope log p + offset), without grad_logp at the target.

    d logp / d z_j = [j = target] - p_j and d H / d z_j = -p_j (log p_j + H).
    """
    offset = torch.zeros_like(entropy) if grad_logp is None else -grad_logp
    if grad_entropy is None:
        return None, offset / temperature
    return -grad_entropy / temperature, (offset - grad_entropy * entropy) / temperature


def _softmax_gradient(log_p: torch.Tensor, slope: torch.Tensor | None, offset: torch.Tensor) -> torch.Tensor:
    """Compute exp(log_p) (slope log_p + offset) in the memory of log_p."""
    if slope is None:
        return log_p.exp_().mul_(offset[:, None])
    probabilities = log_p.exp()
    return log_p.mul_(slope[:, None]).add_(offset[:, None]).mul_(probabilities)


def _compute_dtype(tensor: torch.Tensor) -> torch.dtype:
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


def _accumulate_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to total in place. left has the dtype of total; right has the dtype of the model."""
    if total.is_cuda and right.dtype != total.dtype:
        # Use tensor cores. An unfused projection also rounds the gradient of the logits to the model's dtype.
        total.add_(torch.mm(left.to(right.dtype), right, out_dtype=total.dtype))
    else:
        total.addmm_(left, right.to(total.dtype))
