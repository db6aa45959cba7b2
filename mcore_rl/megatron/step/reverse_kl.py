"""Distances between the policy's and a teacher's distribution over the vocabulary, from hidden states.

Like the log-probabilities (logprobs.py), both output projections are fused with the softmax: logits of the two models
exist for one tile at a time and are recomputed in the backward pass, and tensor-parallel ranks exchange only per-token
statistics.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx

from mcore_rl.megatron.step.tiles import Projection, Tile, accumulate_product, compute_dtype, tiles

SMALLEST_LOG_REST = -60.0
"""Lower bound of the log-probability of all tokens outside the top k together, so that its inverse is finite."""


def linear_reverse_kl(
    hidden: torch.Tensor, policy: Projection, teacher_hidden: torch.Tensor, teacher: Projection
) -> torch.Tensor:
    """Compute KL(policy || teacher) = sum over v of p(v) (log p(v) - log q(v)) over the whole vocabulary, where p and q
    are the softmax of the two projections at the policy's temperature.

    Differentiable in `hidden` and policy.weight; the gradients are partial sums, as in linear_logp_entropy. The teacher
    has none.

    Shapes: hidden [T, h], teacher_hidden [T, h of the teacher]; result float32 [T] (float64 for float64 inputs).
    Units: nats.
    Collective: all ranks of policy.group.
    Raises: ValueError if the rows of the two vocabularies differ.
    """
    if policy.weight.shape[0] != teacher.weight.shape[0] or policy.vocab_size != teacher.vocab_size:
        raise ValueError(
            f"the policy has {policy.weight.shape[0]} rows of a vocabulary of {policy.vocab_size}, and the teacher "
            f"{teacher.weight.shape[0]} of {teacher.vocab_size}"
        )
    kl: torch.Tensor = _LinearReverseKL.apply(hidden, policy.weight, policy, teacher_hidden, teacher)
    return kl


class _LinearReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        policy: Projection,
        teacher_hidden: torch.Tensor,
        teacher: Projection,
    ) -> torch.Tensor:
        pair = hidden, policy, teacher_hidden, teacher
        dtype, lowest = compute_dtype(hidden), torch.finfo(compute_dtype(hidden)).min / 2
        # Rows of maxima: policy z, teacher u. Rows of sums: exp(z - max), exp(z - max) (z - u), exp(u - max).
        maxima = torch.full((2, len(hidden)), lowest, dtype=dtype, device=hidden.device)
        sums = torch.zeros((3, len(hidden)), dtype=dtype, device=hidden.device)
        for tile, z, u in _pairs(*pair):
            old, total = maxima[:, tile.rows].clone(), sums[:, tile.rows]
            maxima[0, tile.rows] = torch.maximum(old[0], z.amax(1))
            maxima[1, tile.rows] = torch.maximum(old[1], u.amax(1))
            _rescale(total, old, maxima[:, tile.rows])
            exponentials = torch.exp(z - maxima[0, tile.rows, None])
            total[0] += exponentials.sum(1)
            total[1] += exponentials.mul_(z.sub_(u)).sum(1)
            total[2] += u.sub_(maxima[1, tile.rows, None]).exp_().sum(1)
        old = maxima.clone()
        policy.reduce(maxima, largest=True)
        _rescale(sums, old, maxima)
        policy.reduce(sums)
        log_sums = maxima + torch.stack((sums[0], sums[2])).log()
        kl = sums[1] / sums[0] - log_sums[0] + log_sums[1]
        # The teacher's projection is no argument of autograd and never changes, so it is kept as it is.
        ctx.save_for_backward(hidden, weight, teacher_hidden, log_sums, kl)
        ctx.projections = policy, teacher
        return kl

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_kl: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        hidden, weight, teacher_hidden, log_sums, kl = ctx.saved_tensors
        policy, teacher = ctx.projections
        gradients = _Gradients(ctx, hidden, weight, policy)
        scale = grad_kl / policy.options(hidden).temperature
        for tile, z, u in _pairs(hidden, policy, teacher_hidden, teacher):
            # d KL / d z_j = p_j (log p_j - log q_j - KL)
            log_p = z.sub_(log_sums[0, tile.rows, None])
            distance = u.sub_(log_sums[1, tile.rows, None]).neg_().add_(log_p).sub_(kl[tile.rows, None])
            gradients.add(tile, log_p.exp_().mul_(distance).mul_(scale[tile.rows, None]))
        return *gradients.results(), None, None, None


def _pairs(
    hidden: torch.Tensor, policy: Projection, teacher_hidden: torch.Tensor, teacher: Projection
) -> Iterator[tuple[Tile, torch.Tensor, torch.Tensor]]:
    """Yield every tile with the scaled logits of both models; see tiles.tiles."""
    ours = tiles(hidden, policy.weight, policy.options(hidden))
    theirs = tiles(teacher_hidden, teacher.weight, teacher.options(teacher_hidden))
    for (tile, z), (_, u) in zip(ours, theirs, strict=True):
        yield tile, z, u


def _rescale(sums: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> None:
    """Rescale the three sums in place from the maxima `old` to `new`, both [2, T]."""
    factors = torch.exp(old - new)
    sums[:2] *= factors[0]
    sums[2] *= factors[1]


class _Gradients:
    """Gradients of hidden states and of the projection's weight, accumulated over tiles of gradients of logits."""

    def __init__(self, ctx: FunctionCtx, hidden: torch.Tensor, weight: torch.Tensor, model: Projection) -> None:
        dtype, self._exact = compute_dtype(hidden), model.float32_head
        self._inputs = hidden, weight
        self._sums = [
            torch.zeros(tensor.shape, dtype=dtype, device=tensor.device) if needed else None
            for tensor, needed in zip(self._inputs, ctx.needs_input_grad, strict=False)
        ]

    def add(self, tile: Tile, grad_logits: torch.Tensor) -> None:
        (hidden, weight), (of_hidden, of_weight) = self._inputs, self._sums
        if of_hidden is not None:
            accumulate_product(of_hidden[tile.rows], grad_logits, weight[tile.columns], float32_head=self._exact)
        if of_weight is not None:
            accumulate_product(of_weight[tile.columns], grad_logits.t(), hidden[tile.rows], float32_head=self._exact)

    def results(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        of_hidden, of_weight = (
            None if total is None else total.to(tensor.dtype)
            for total, tensor in zip(self._sums, self._inputs, strict=True)
        )
        return of_hidden, of_weight


def linear_top_k(hidden: torch.Tensor, model: Projection, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the k most probable tokens at each position. Records no gradient.

    Shapes: hidden [T, h]; k below the vocabulary's size; results: token ids int64 [T, k], most probable first, and
    log-probabilities float32 (float64 for float64 inputs) [T, k + 1] of these and of all other tokens together.
    Units: nats.
    Collective: all ranks of model.group; each contributes its own k best tokens.
    """
    options = model.options(hidden)
    dtype, device = compute_dtype(hidden), hidden.device
    first = options.first_entry(model.weight)
    maximum, rest = _empty_sums(hidden)
    best = torch.full((len(hidden), k), torch.finfo(dtype).min / 2, dtype=dtype, device=device)
    ids = torch.zeros((len(hidden), k), dtype=torch.int64, device=device)
    with torch.no_grad():
        for tile, logits in tiles(hidden, model.weight, options):
            rows = tile.rows
            _, columns = logits.topk(min(k, logits.shape[1]), dim=1)
            values = _taken_out(logits, columns)
            best[rows], ids[rows], beaten = _merge(best[rows], ids[rows], values, columns + tile.columns.start + first)
            # Sums of positive numbers: the total less the k best would lose a small rest in float32.
            _add_exponentials(maximum, rest, rows, logits)
            _add_exponentials(maximum, rest, rows, beaten)
        if model.group is not None and (size := dist.get_world_size(model.group)) > 1:
            # Each rank fills its own columns, so that all ranks select from the same values in the same order.
            values, joined = best.new_zeros((len(best), size, k)), ids.new_zeros((len(ids), size, k))
            place = dist.get_rank(model.group)
            values[:, place], joined[:, place] = best, ids
            for table in (values, joined):
                model.reduce(table)
            values, joined = values.flatten(1), joined.flatten(1)
            _reduce_sums(model, maximum, rest)
            best, chosen = values.topk(k, dim=1)
            ids = joined.gather(1, chosen)
            _add_exponentials(maximum, rest, slice(None), values.scatter(1, chosen, torch.finfo(dtype).min / 2))
        logp, _ = _outcomes(best, maximum, rest)
    return ids, logp


def _empty_sums(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a maximum below every logit and a sum of 0 for each position, [T] each."""
    dtype = compute_dtype(hidden)
    maximum = torch.full((len(hidden),), torch.finfo(dtype).min / 2, dtype=dtype, device=hidden.device)
    return maximum, torch.zeros_like(maximum)


def _taken_out(logits: torch.Tensor, columns: torch.Tensor, inside: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits at `columns` [n, k] and replace them in place by a value whose exponential is 0. Columns where
    `inside` is false are left alone, and their results are 0."""
    values, limits = logits.gather(1, columns), torch.finfo(logits.dtype)
    new = torch.full_like(values, limits.min / 2)
    if inside is not None:
        values, new = values * inside, new.masked_fill(~inside, limits.max)
    # The smaller value: columns outside the tile are clamped to it and may point at a token that must stay.
    logits.scatter_reduce_(1, columns, new, "amin")
    return values


def _merge(
    best: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, value_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keep the k best of two sets of logits. Returns them with their ids, and all logits without them."""
    values, value_ids = torch.cat((best, values), 1), torch.cat((ids, value_ids), 1)
    kept, chosen = values.topk(best.shape[1], dim=1)
    return kept, value_ids.gather(1, chosen), values.scatter(1, chosen, torch.finfo(values.dtype).min / 2)


def _add_exponentials(maximum: torch.Tensor, total: torch.Tensor, rows: slice, logits: torch.Tensor) -> None:
    """Add the exponentials of logits to the sums of their rows, relative to the maximum, in place."""
    new = torch.maximum(maximum[rows], logits.amax(1))
    total[rows] = total[rows] * torch.exp(maximum[rows] - new) + _exponentials(logits, new).sum(1)
    maximum[rows] = new


def _exponentials(logits: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """Compute exp(logits - maximum), and 0 for logits that were taken out even if they are the maximum."""
    return torch.exp(logits - maximum[:, None]).masked_fill_(logits <= torch.finfo(logits.dtype).min / 2, 0.0)


def _reduce_sums(model: Projection, maximum: torch.Tensor, total: torch.Tensor) -> None:
    """Add the sums of all ranks, relative to the largest maximum, in place."""
    own = maximum.clone()
    model.reduce(maximum, largest=True)
    total *= torch.exp(own - maximum)
    model.reduce(total)


def _outcomes(
    at_tokens: torch.Tensor, maximum: torch.Tensor, rest: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Compute the log-probabilities [T, k + 1] of k tokens and of the rest, from logits and the rest's sum. Also the
    largest logit and the logarithm of the sum of all exponentials relative to it."""
    largest = torch.maximum(maximum, at_tokens.amax(1)) if at_tokens.shape[1] else maximum
    # Relative to the largest logit before the logarithm: logits of 60 are off by 4e-6 in float32.
    relative = torch.cat((at_tokens - largest[:, None], (maximum - largest + rest.log())[:, None]), 1)
    logp = relative.log_softmax(1)
    logp[:, -1].clamp_(min=SMALLEST_LOG_REST)
    return logp, (largest, torch.logsumexp(relative, 1))


def linear_logp_at(hidden: torch.Tensor, model: Projection, ids: torch.Tensor) -> torch.Tensor:
    """Compute the log-probabilities of several tokens per position, and of all other tokens together; differentiable in
    `hidden` and model.weight.

    Shapes: hidden [T, h]; ids int64 [T, k], global and distinct in a row; result float32 (float64 for float64 inputs)
    [T, k + 1], the last column for the other tokens.
    Units: nats.
    Collective: all ranks of model.group.
    """
    logp: torch.Tensor = _LinearLogpAt.apply(hidden, model.weight, model, ids)
    return logp


class _LinearLogpAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: torch.Tensor, weight: torch.Tensor, model: Projection, ids: torch.Tensor
    ) -> torch.Tensor:
        options, dtype = model.options(hidden), compute_dtype(hidden)
        local = ids - options.first_entry(weight)
        maximum, rest = _empty_sums(hidden)
        at_tokens = torch.zeros(ids.shape, dtype=dtype, device=hidden.device)  # 0 if another rank holds the token
        for tile, logits in tiles(hidden, weight, options):
            at_tokens[tile.rows] += _taken_out(logits, *_inside(local, tile))
            _add_exponentials(maximum, rest, tile.rows, logits)
        _reduce_sums(model, maximum, rest)
        model.reduce(at_tokens)
        logp, (largest, log_sum) = _outcomes(at_tokens, maximum, rest)
        ctx.save_for_backward(hidden, weight, local, largest, log_sum, logp)
        ctx.model = model
        return logp

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_logp: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden, weight, local, largest, log_sum, logp = ctx.saved_tensors
        options, gradients = ctx.model.options(hidden), _Gradients(ctx, hidden, weight, ctx.model)
        temperature = options.temperature
        grad = grad_logp / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)
        total, of_rest = grad.sum(1, keepdim=True), grad[:, -1:]
        # d logp_k / d z_j = [j = token k] - p_j. For the rest R, the bracket is p_j / R for tokens that it contains.
        at_tokens = grad[:, :-1] - total * logp[:, :-1].exp()
        elsewhere = of_rest * torch.exp(-logp[:, -1:]) - total
        for tile, logits in tiles(hidden, weight, options):
            columns, inside = _inside(local, tile)
            _taken_out(logits, columns, inside)
            log_p = logits.sub_(largest[tile.rows, None]).sub_(log_sum[tile.rows, None])
            grad_logits = log_p.exp_().mul_(elsewhere[tile.rows])
            gradients.add(tile, grad_logits.scatter_add_(1, columns, at_tokens[tile.rows] * inside))
        return *gradients.results(), None, None


def _inside(local: torch.Tensor, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns of the tokens in a tile, clamped to it, and whether they are inside, both [n, k]."""
    columns = local[tile.rows] - tile.columns.start
    width = tile.columns.stop - tile.columns.start
    return columns.clamp(0, width - 1), (columns >= 0) & (columns < width)


def top_k_reverse_kl(logp: torch.Tensor, teacher_logp: torch.Tensor, rest: str) -> torch.Tensor:
    """Compute the reverse KL over the teacher's k most probable tokens, from the log-probabilities that linear_logp_at
    and linear_top_k return.

    rest=bucket: sum over k of p_k (log p_k - log q_k), and the same term for all other tokens together: the KL between
    distributions over k + 1 outcomes. It is never above the KL over the vocabulary.
    rest=renormalize: the KL between p_k / P and q_k / Q, where P and Q are the sums over the k tokens. It does not
    change if the policy moves probability out of the k tokens.

    Shapes: logp with gradient, teacher_logp [T, k + 1] -> [T]. Units: nats.
    """
    if rest == "renormalize":
        logp, teacher_logp = logp[:, :-1].log_softmax(1), teacher_logp[:, :-1].log_softmax(1)
    return (logp.exp() * (logp - teacher_logp)).sum(1)
