"""Context parallelism: distribution of a packed row's tokens over ranks, and gathering of values for losses.

Each sequence is padded to a multiple of 2 * size tokens and split into 2 * size chunks. Rank r holds chunks r and
2 * size - 1 - r, so that all ranks have the same work under a causal mask. Example with two ranks and sequences padded
to 8 and 4 tokens:

    position in the row      0 1 2 3 4 5 6 7   8 9 10 11
    chunk of the sequence    0 0 1 1 2 2 3 3   0 1  2  3
    rank                     0 0 1 1 1 1 0 0   0 1  1  0
    row of rank 0            0 1 6 7           8 11
    row of rank 1            2 3 4 5           9 10

Padding is at the end of a sequence, where no other token attends to it. Imports no megatron.core.
Source: the order that TransformerEngine's attention, rotary embeddings and roll_tensor of megatron-core 0.16.1 expect.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True)
class ContextPart:
    """A context-parallel rank and its group (None: never communicates)."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def multiple(self) -> int:
        """The length of every padded sequence must be a multiple of this number."""
        return 2 * self.size if self.size > 1 else 1

    def chunks(self) -> tuple[int, int]:
        """Indices of the two chunks of each sequence on this rank, ascending."""
        return self.rank, 2 * self.size - 1 - self.rank

    def positions(self, lengths: torch.Tensor) -> torch.Tensor:
        """Positions of this rank's tokens within their sequences, in the order of the rank's row.

        Shapes: lengths int64 [sequences], padded -> int64 [sum(lengths) / size].
        """
        rank_lengths = lengths // self.size
        chunk = (rank_lengths // 2).repeat_interleave(rank_lengths)
        starts = (rank_lengths.cumsum(0) - rank_lengths).repeat_interleave(rank_lengths)
        place = torch.arange(len(chunk), device=lengths.device) - starts
        # The first half of the rank's tokens is in its front chunk, the second half in its back chunk.
        front, back = self.chunks()
        return place + torch.where(place < chunk, front * chunk, (back - 1) * chunk)

    def row_indices(self, lengths: torch.Tensor) -> torch.Tensor:
        """Indices of this rank's tokens in the row of all ranks. Shapes: like `positions`."""
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths // self.size)
        return starts + self.positions(lengths)

    def owners(self, lengths: torch.Tensor) -> torch.Tensor:
        """Rank of every token. Shapes: lengths int64 [sequences], padded -> int64 [sum(lengths)]."""
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        chunk = (lengths // self.multiple).repeat_interleave(lengths)
        number = (torch.arange(len(chunk), device=lengths.device) - starts) // chunk
        return torch.minimum(number, 2 * self.size - 1 - number)

    def gather(self, values: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """Gather per-token values from all ranks. Differentiable: the backward pass sums the gradient over all ranks
        and returns this rank's part, so each rank may continue with its own part of a sum.

        Shapes: owners int64 [N], the rank of each token, equal on all ranks; values [K, n] of this rank's n tokens, in
        the same order; returns [K, N].
        Collective: all ranks of `group`, again in the backward pass.
        """
        return _GatherTokens.apply(values, owners, self)


SINGLE_RANK = ContextPart()
"""No context parallelism: the rank holds the whole row."""


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, values: torch.Tensor, owners: torch.Tensor, part: ContextPart) -> torch.Tensor:
        ctx.part = part
        ctx.save_for_backward(owners)
        counts = owners.bincount(minlength=part.size)
        width = int(counts.max())
        sent = values.new_zeros(width, len(values))  # padded: all_gather needs equal sizes
        sent[: values.shape[1]] = values.t()
        gathered = values.new_empty(part.size * width, len(values))
        dist.all_gather_single(gathered, sent, group=part.group)
        # ordinal: position of each token among the tokens of its owner, hence in the owner's part of the result.
        by_owner = owners.argsort(stable=True)
        first = (counts.cumsum(0) - counts)[owners]
        ordinal = by_owner.argsort() - first
        return gathered.index_select(0, owners * width + ordinal).t().contiguous()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (owners,) = ctx.saved_tensors
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.part.group)
        return total[:, owners == ctx.part.rank], None, None
