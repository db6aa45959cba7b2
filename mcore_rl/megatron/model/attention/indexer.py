"""Indexer of DeepSeek's sparse attention: the tokens to which each query of a packed row attends.

With the rotated queries q of head j (H heads of d elements), the rotated keys k that all heads share, and weights w:

    score of query s and token t = sum over j of w_sj / sqrt(H) * relu(q_sj k_t / sqrt(d))

A query attends to the `topk` tokens with the largest scores among its own and the earlier ones. The choices have no
gradient, so the parameters are frozen. Near-ties may be decided otherwise in another layout or engine, like choices of
experts.

Scores are computed for blocks of queries: O(S^2) operations for a sequence of S tokens, and O(S) memory. Every
tensor-parallel rank holds the whole indexer and scores its own part of the tokens.

Source: transformers models/deepseek_v32 (5.19), without the reference's Hadamard transform and FP8 scores, which change
no product or only its rounding. megatron-core 0.16.1 rotates the last part of a head instead of the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig

QUERIES = 64
"""Queries whose scores exist at the same time."""
NORM_EPSILON = 1e-6
"""Epsilon of the keys' LayerNorm, whatever the model's is."""


class Indexer(MegatronModule):
    """Scores of one layer's attention.

    Parameters, on every tensor-parallel rank: linear_wq_b.weight [H d, q_lora_rank], linear_wk.weight [d, hidden],
    k_norm.weight and k_norm.bias [d], linear_weights_proj.weight [H, hidden].

    tp_group: tensor-parallel ranks, which divide the tokens between them (sequence parallelism).
    """

    def __init__(self, config: MLATransformerConfig, tp_group: dist.ProcessGroup) -> None:
        super().__init__(config)
        self.heads, self.size, self.topk = (
            config.dsa_indexer_n_heads,
            config.dsa_indexer_head_dim,
            config.dsa_indexer_topk,
        )
        self.rotated, self.interleaved = config.qk_pos_emb_head_dim, config.dsa_indexer_interleaved
        self.tp_group = tp_group
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        options = {"dtype": config.params_dtype, "device": device}
        self.linear_wq_b = torch.nn.Linear(config.q_lora_rank, self.heads * self.size, bias=False, **options)
        self.linear_wk = torch.nn.Linear(config.hidden_size, self.size, bias=False, **options)
        self.k_norm = torch.nn.LayerNorm(self.size, eps=NORM_EPSILON, **options)
        self.linear_weights_proj = torch.nn.Linear(config.hidden_size, self.heads, bias=False, **options)
        for projection in (self.linear_wq_b, self.linear_wk, self.linear_weights_proj):
            config.init_method(projection.weight)
        self.requires_grad_(False)

    @torch.no_grad()
    def choose(
        self, hidden: torch.Tensor, latent: torch.Tensor, rotation: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor | None:
        """Choose the tokens of all queries of a packed row.

        Shapes: this rank's T / tp tokens: hidden [T / tp, hidden] and the normalized latent of queries
        [T / tp, q_lora_rank]; rotation complex [longest sequence, rotated / 2], by position -> int32 [T, topk],
        positions in the sequence. A query with fewer visible tokens than topk also has later positions. Rows of
        sequences of at most topk tokens are undefined; None if all sequences are so short.
        Collective: tp_group, unless the result is None.
        """
        if max(lengths) <= self.topk:
            return None
        first = self.tp_group.rank() * len(hidden)
        positions = torch.cat([torch.arange(length, device=hidden.device) for length in lengths])
        turns = rotation[positions[first : first + len(hidden)]]
        queries = self._rotate(self.linear_wq_b(latent).unflatten(1, (self.heads, self.size)), turns[:, None])
        keys = self._gathered(self._rotate(self.k_norm(self.linear_wk(hidden)), turns)).float()
        weights = F.linear(hidden.float(), self.linear_weights_proj.weight.float()) * self.heads**-0.5
        chosen = torch.zeros(len(hidden), self.topk, dtype=torch.int32, device=hidden.device)
        start = 0
        for length in lengths:
            own = range(max(start, first), min(start + length, first + len(hidden)))
            for block in range(own.start, own.stop, QUERIES) if length > self.topk else ():
                end = min(block + QUERIES, own.stop)
                rows = slice(block - first, end - first)
                # Later keys are visible to no query of the block, but topk needs a score for each of its choices.
                visible = keys[start : max(end, start + self.topk)]
                chosen[rows] = self._best(queries[rows], visible, weights[rows], block - start)
            start += length
        return self._gathered(chosen)

    def _best(self, queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, position: int) -> torch.Tensor:
        """Return the best tokens of consecutive queries, of which the first has this position.

        Shapes: queries [n, H, d], keys [m, d], weights [n, H] -> int64 [n, topk].
        """
        products = torch.matmul(queries.float(), keys.t()) * self.size**-0.5
        scores = torch.matmul(weights[:, None], products.relu())[:, 0]
        later = torch.ones_like(scores, dtype=torch.bool).triu(position + 1)
        return scores.masked_fill(later, -torch.inf).topk(self.topk, -1).indices

    def _rotate(self, vectors: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Rotate the first part of vectors [..., d]. The order of the result's elements differs from the argument's,
        equally for queries and keys."""
        rotated, rest = vectors.split((self.rotated, self.size - self.rotated), -1)
        a, b = (rotated[..., 0::2], rotated[..., 1::2]) if self.interleaved else rotated.chunk(2, -1)
        cos, sin = turns.real.to(vectors.dtype), turns.imag.to(vectors.dtype)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Concatenate the rows of all tensor-parallel ranks."""
        ranks = self.tp_group.size()
        if ranks == 1:
            return rows
        whole = rows.new_empty(ranks * len(rows), *rows.shape[1:])
        dist.all_gather_single(whole, rows.contiguous(), group=self.tp_group)
        return whole
