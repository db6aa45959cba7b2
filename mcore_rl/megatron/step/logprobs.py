"""Log-probabilities and entropies of given tokens from hidden states, without materializing all logits.

The output projection is fused with the softmax: logits exist for one tile (some tokens x part of the vocabulary) at a
time and are recomputed in the backward pass. Each tensor-parallel rank reduces its own vocabulary shard; the ranks then
exchange only per-token statistics, with one MAX and one SUM all-reduce per call for any number of tiles.

With `kept`, the softmax of each token is normalized over its own set S of entries ("keep sampling mask", DeepSeek-V3.2,
arXiv 2512.02556), for logits z at the temperature of sampling:

    log p(y) = z_y - log sum_{v in S} exp(z_v)             H = -sum_{v in S} p(v) log p(v)

Tokens are computed in groups (set_groups.py), with the logits of the columns that a group needs. The
logits of entries outside a set are kept_tokens.DROPPED, so that their probability and their gradient are exactly 0. A
rank whose shard has no entry of a token's set contributes nothing to it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

from mcore_rl.megatron.step.kept_tokens import KeptTokens
from mcore_rl.megatron.step.tiles import Options, Tile, accumulate_product, compute_dtype, targets_in_tile, tiles


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
    float32_head: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log softmax(hidden weight^T / temperature) at the targets, and the entropy of the distribution.

    Both results are differentiable in hidden and weight. The gradient of hidden is this rank's partial sum; the caller
    must reduce it over the group. Vocabulary rows from vocab_size on are padding: excluded, with zero gradient. Without
    compute_entropy the entropy is zero.

    kept: set of entries of each token; the softmax, its entropy and their gradients cover the set only. It must contain
    the token's target. None: the whole vocabulary.

    The logits are float32 whatever the dtype of hidden and weight: products of bfloat16 numbers are exact in float32,
    in which they are added. With float32_head, products of the backward pass are float32 on GPUs too
    (tiles.accumulate_product).

    Shapes: hidden [T, h]; weight [V, h], this rank's rows of the vocabulary; targets int64 [T], global token ids;
    temperature: a number or [T], without gradient; results float32 [T] (float64 for float64 inputs). At most
    chunk_tokens rows of logits exist at a time.
    Units: nats.
    Collective: all ranks of `group` (None: weight is the whole vocabulary), with equal hidden and targets.
    """
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.detach().to(compute_dtype(hidden))
    if kept is not None and len(kept) != len(hidden):
        raise ValueError(f"{len(kept)} sets of kept entries for {len(hidden)} tokens")
    if kept is not None:
        # The tokens of a group become consecutive rows.
        hidden, targets = hidden.index_select(0, kept.order), targets.index_select(0, kept.order)
        if isinstance(temperature, torch.Tensor):
            temperature = temperature.index_select(0, kept.order)
    options = Options(temperature, chunk_tokens, group, compute_entropy, vocab_size, kept, float32_head)
    logp, entropy = _LinearLogpEntropy.apply(hidden, weight, targets, options)
    if kept is not None:
        logp, entropy = logp.index_select(0, kept.places), entropy.index_select(0, kept.places)
    return logp, entropy


class _LinearLogpEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, options: Options
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
        dtype, exact = log_sum.dtype, ctx.options.float32_head
        grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if ctx.needs_input_grad[1] else None
        # Recompute the logits tile by tile; the tile's memory is reused for the gradient of its logits.
        for tile, logits in tiles(hidden, weight, ctx.options):
            rows = tile.rows
            grad_logits = _softmax_gradient(
                tile, logits.sub_(log_sum[rows, None]), None if slope is None else slope[rows], offset[rows]
            )
            if at_target is not None:
                index, inside = targets_in_tile(local_targets, tile)
                grad_logits.scatter_add_(1, index, (at_target[rows] * inside)[:, None])
            if grad_hidden is not None:
                accumulate_product(grad_hidden[rows], grad_logits, tile.weight, float32_head=exact)
            if grad_weight is not None:
                tile.add_weight_gradient(grad_weight, grad_logits, hidden[rows], float32_head=exact)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
        )


def _local_statistics(
    hidden: torch.Tensor, weight: torch.Tensor, local_targets: torch.Tensor, options: Options
) -> torch.Tensor:
    """Compute online-softmax statistics over this rank's vocabulary: [4, T], in its rows: maximum m, sum exp(z - m),
    sum exp(z - m) (z - m), and the target's logit (0 if another rank holds it)."""
    statistics = torch.zeros((4, hidden.shape[0]), dtype=compute_dtype(hidden), device=hidden.device)
    # Tokens without tiles keep a maximum below every logit; -inf would give -inf * 0 = nan.
    statistics[0] = torch.finfo(statistics.dtype).min / 2
    scratch: torch.Tensor | None = None
    for tile, logits in tiles(hidden, weight, options):
        maximum, total, weighted, target_logit = (row[tile.rows] for row in statistics)
        index, inside = targets_in_tile(local_targets, tile)
        target_logit += logits.gather(1, index).squeeze(1) * inside
        new_maximum = logits.amax(1)
        if not tile.first_column:
            new_maximum = torch.maximum(new_maximum, maximum)
            _shift(maximum, total, weighted, new_maximum)
        maximum.copy_(new_maximum)
        logits.sub_(new_maximum[:, None])
        if options.compute_entropy:
            if scratch is None or len(scratch) < logits.numel():
                scratch = torch.empty(logits.numel(), dtype=logits.dtype, device=logits.device)
            exponentials = tile.exp(logits, scratch[: logits.numel()].view(logits.shape))
            weighted += logits.mul_(exponentials).sum(1)
        else:
            exponentials = tile.exp(logits, logits)
        total += exponentials.sum(1)
    return statistics


def _shift(old: torch.Tensor, total: torch.Tensor, weighted: torch.Tensor, new: torch.Tensor) -> None:
    """Rescale the two sums in place from maximum `old` to `new`."""
    factor = torch.exp(old - new)
    weighted.add_(total * (old - new)).mul_(factor)
    total.mul_(factor)


def _reduce_statistics(statistics: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


def _softmax_gradient(
    tile: Tile, log_p: torch.Tensor, slope: torch.Tensor | None, offset: torch.Tensor
) -> torch.Tensor:
    """Compute exp(log_p) (slope log_p + offset) in the memory of log_p."""
    if slope is None:
        return tile.exp(log_p, log_p).mul_(offset[:, None])
    probabilities = tile.exp(log_p, torch.empty_like(log_p))
    return log_p.mul_(slope[:, None]).add_(offset[:, None]).mul_(probabilities)
