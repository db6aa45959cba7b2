"""RMS norm over all heads of a query or key at once (MiniMax-M2), divided over tensor-parallel ranks like the heads.

With n elements in all heads of a token, on all ranks, weight w and gradient g of the output y:

    r = (sum_j x_j^2 / n + epsilon)^(-1/2)        y_i = w_i x_i r
    dx_i = r (w_i g_i - x_i r / n * sum_j w_j g_j x_j r)

Both sums run over the heads of all tensor-parallel ranks, so the backward pass has an all-reduce too: without it, every
rank would lack the gradient through the heads of the others.

A rank normalizes whole sequences, also with sequence parallelism, because the projection before the norm gathers them.
The gradient of its part of the weight is therefore complete, and no other rank has this part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.autograd.function import FunctionCtx


class HeadNorm(torch.nn.Module):
    """RMS norm of all `num_heads` heads of a token, of which this rank has num_heads / tp.

    hidden_size: size of one head. Built by a layer spec.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, num_heads: int) -> None:
        super().__init__()
        self.eps, self.width = eps, num_heads * hidden_size
        self.group = parallel_state.get_tensor_model_parallel_group()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        local = torch.ones(self.width // self.group.size(), dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(local)
        # Gradient norms count a parameter with this mark on every rank, other parameters on the first rank only.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the heads of every token. Shapes: [..., heads of this rank, head size], also of the result.

        Collective: the tensor-parallel ranks, here and in the backward pass.
        """
        normalized: torch.Tensor = _Normalize.apply(x, self.weight.view(x.shape[-2:]), self.eps, self.width, self.group)
        return normalized

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[tuple[int, int, int]] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Describe the weight for checkpoints: one whole tensor, whose parts the tensor-parallel ranks hold."""
        state = self.state_dict(prefix="", keep_vars=True)
        group = (metadata or {}).get("dp_cp_group")
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets, tp_group=self.group, dp_cp_group=group
        )


class _Normalize(torch.autograd.Function):
    """The norm with its gradient. Saves the input, and a float32 number per token, instead of float32 copies."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, eps: float, width: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        wide = x.float()
        scale = (_sum_of_heads(wide.square(), group) / width + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        ctx.width, ctx.group = width, group
        # Rounded before the product, as in transformers.
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        x, weight, scale = ctx.saved_tensors
        normalized, grad = x.float() * scale, grad.float()
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (grad * normalized).flatten(0, -3).sum(0).to(weight.dtype)
        weighted = grad * weight.float()
        mean = _sum_of_heads(weighted * normalized, ctx.group) / ctx.width
        return ((weighted - normalized * mean) * scale).to(x.dtype), of_weight, None, None, None


def _sum_of_heads(terms: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum the terms of each token over the heads of all ranks. Shapes: [..., heads, head size] -> [..., 1, 1]."""
    total = terms.sum((-2, -1), keepdim=True)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


def use_head_norms(attention: SelfAttentionSubmodules, config: TransformerConfig) -> None:
    """Set HeadNorm as the norms of queries and keys in the spec of an attention layer."""
    attention.q_layernorm = ModuleSpec(HeadNorm, params={"num_heads": config.num_attention_heads})
    attention.k_layernorm = ModuleSpec(HeadNorm, params={"num_heads": config.num_query_groups})
