"""Single-pass CPU kernels that replace sequences of eager operations in megatron-core 0.16.1.

They correspond to TransformerEngine's kernels on CUDA; results are the same up to rounding. Unsupported inputs
(bfloat16, other rotations, capacity padding) use the original function.
"""

from __future__ import annotations

from types import ModuleType
from typing import TypeAlias

import torch
import torch.distributed as dist

from mcore_rl.megatron.cpu.kernels import supports
from mcore_rl.megatron.cpu.registry import Fix, fix

OptionalTensor: TypeAlias = torch.Tensor | None


@fix("fused_rotary", "models.common.embeddings.rope_utils")
def _fused_rotary(this: Fix, module: ModuleType) -> None:
    """Replace the rotary embedding of packed sequences, which slices frequencies per sequence in a Python loop, in
    every layer, for queries and keys."""
    from mcore_rl.megatron.cpu.kernels.rotary import rotate
    from mcore_rl.megatron.model.attention.context import ContextPart

    original = module._apply_rotary_pos_emb_thd

    def rotate_packed(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        *,
        mscale: float = 1.0,
        cp_group: dist.ProcessGroup,
        multi_latent_attention: bool = False,
        **other_rotations: bool,
    ) -> torch.Tensor:
        if any(other_rotations.values()) or not supports(t):
            options = other_rotations | {"multi_latent_attention": multi_latent_attention}
            return original(t, cu_seqlens, freqs, mscale=mscale, cp_group=cp_group, **options)
        if multi_latent_attention:  # pairs are adjacent dimensions, and all dimensions are rotated
            t = torch.cat((t[..., 0::2], t[..., 1::2]), -1)
        # The table has no gradient.
        table = freqs.detach().flatten(1)
        cos, sin = ((function(table) * mscale).to(t.dtype) for function in (torch.cos, torch.sin))
        part = ContextPart(cp_group.rank(), cp_group.size())
        lengths = cu_seqlens.diff().long()
        # As in Megatron's function: a table as long as the whole row has a row per token, not per position (mrope).
        # For a single sequence the two are equal.
        by_token = len(table) == int(cu_seqlens[-1])
        return rotate(t, cos, sin, part.row_indices(lengths) if by_token else part.positions(lengths))

    this.patch(module, "_apply_rotary_pos_emb_thd", rotate_packed)


@fix("fused_swiglu", "transformer.mlp")
def _fused_swiglu(this: Fix, module: ModuleType) -> None:
    """Replace SwiGLU, which on a CPU consists of eager operations that each read [tokens * top-k, 2 * intermediate]."""
    from mcore_rl.megatron.cpu.kernels.swiglu import weighted_swiglu

    plain, weighted = module.bias_swiglu_impl, module.weighted_bias_swiglu_impl

    def swiglu(x: torch.Tensor, bias: OptionalTensor, *options: object) -> torch.Tensor:
        if bias is not None or any(options) or not supports(x):
            return plain(x, bias, *options)
        rows = x.flatten(0, -2)
        return weighted_swiglu(rows, rows.new_ones(len(rows))).unflatten(0, x.shape[:-1])

    def expert_swiglu(x: torch.Tensor, bias: OptionalTensor, weights: torch.Tensor, *options: object) -> torch.Tensor:
        if bias is not None or any(options) or not supports(x) or weights.dtype != x.dtype:
            return weighted(x, bias, weights, *options)
        return weighted_swiglu(x.flatten(0, -2), weights.flatten()).unflatten(0, x.shape[:-1])

    this.patch(module, "bias_swiglu_impl", swiglu)
    this.patch(module, "weighted_bias_swiglu_impl", expert_swiglu)


@fix("fused_permute", "transformer.moe.token_dispatcher")
def _fused_permute(this: Fix, module: ModuleType) -> None:
    """Replace permutation of tokens. The original adds rows with an index expanded to every element, and copies all
    tokens to sort chunks even if they are sorted (with a single expert-parallel rank)."""
    from mcore_rl.megatron.cpu.kernels.experts import add_rows, gather_rows

    permute, unpermute, sort_chunks = module.permute, module.unpermute, module.sort_chunks_by_idxs

    def permute_rows(
        tokens: torch.Tensor,
        routing_map: torch.Tensor,
        probs: OptionalTensor = None,
        drop_and_pad: bool = False,
        **options: object,
    ) -> tuple[torch.Tensor, OptionalTensor, torch.Tensor]:
        if drop_and_pad or not supports(tokens):
            return permute(tokens, routing_map, probs=probs, drop_and_pad=drop_and_pad, **options)
        by_expert = routing_map.T.contiguous()
        index = by_expert.nonzero()[:, 1].contiguous()
        # In the order of the rows: by expert, then by token.
        permuted_probs = None if probs is None else probs.T.contiguous().masked_select(by_expert)
        return gather_rows(tokens, index), permuted_probs, index

    def unpermute_rows(
        permuted: torch.Tensor,
        index: torch.Tensor,
        restore_shape: torch.Size,
        probs: OptionalTensor = None,
        drop_and_pad: bool = False,
        **options: object,
    ) -> torch.Tensor:
        if probs is not None or drop_and_pad or not supports(permuted):
            return unpermute(permuted, index, restore_shape, probs=probs, drop_and_pad=drop_and_pad, **options)
        return add_rows(permuted, index, restore_shape[0])

    def sort_rows(
        tokens: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor, probs: OptionalTensor = None, **options: object
    ) -> tuple[torch.Tensor, OptionalTensor]:
        if bool((order.diff() > 0).all()):
            return tokens, probs
        return sort_chunks(tokens, sizes, order, probs=probs, **options)

    this.patch(module, "permute", permute_rows)
    this.patch(module, "unpermute", unpermute_rows)
    this.patch(module, "sort_chunks_by_idxs", sort_rows)


@fix("grouped_experts", "transformer.moe.experts")
def _grouped_experts(this: Fix, module: ModuleType) -> None:
    """Replace SequentialMLP.forward, which runs each expert as a separate module and copies its inputs and outputs."""
    from mcore_rl.megatron.cpu.kernels.experts import grouped_linear
    from mcore_rl.megatron.cpu.kernels.swiglu import weighted_swiglu

    original = module.SequentialMLP.forward

    def forward(
        self: torch.nn.Module, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        if not _groupable(self, tokens, probs):
            return original(self, tokens, tokens_per_expert, probs)
        rows = tokens_per_expert.tolist()
        gated = grouped_linear(tokens, [expert.linear_fc1.weight for expert in self.local_experts], rows)
        hidden = weighted_swiglu(gated, probs)
        return grouped_linear(hidden, [expert.linear_fc2.weight for expert in self.local_experts], rows), None

    this.patch(module.SequentialMLP, "forward", forward)


def _groupable(experts: torch.nn.Module, tokens: torch.Tensor, probs: torch.Tensor) -> bool:
    """Return whether the experts are plain SwiGLU layers without hooks on the modules in them."""

    config = experts.config
    return (
        supports(tokens)
        and probs.dtype == tokens.dtype
        and config.gated_linear_unit
        and config.activation_func is torch.nn.functional.silu
        and config.activation_func_clamp_value is None
        and not config.add_bias_linear
        and not config.moe_apply_probs_on_input
        # Hooks of `experts` itself run outside of its forward pass.
        and not any(part._forward_pre_hooks or part._forward_hooks for part in experts.modules() if part is not experts)
    )
