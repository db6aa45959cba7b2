"""Comparison of Megatron's mixture-of-experts code with and without TransformerEngine: permutations of tokens
(interpreted Triton) and the router's matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.te.simulation import install

install()

import torch  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

TOKENS, EXPERTS, HIDDEN, TOP_K = 7, 4, 16, 2
FOUND = moe_utils.te_general_gemm
"""TransformerEngine's product with a workspace, as megatron 0.16.1 imports it; None for versions after 2.9."""


def _gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    loss = sum((output * torch.arange(1.0, output.numel() + 1).view_as(output)).sum() for output in outputs)
    return list(torch.autograd.grad(loss, inputs))


def there_and_back(fused: bool) -> list[torch.Tensor]:
    """Permute tokens to the order of experts and back. Returns the results and the gradients of tokens and
    probabilities."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    chosen = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    routing = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
    probs = (torch.rand(TOKENS, EXPERTS, generator=generator) * routing).requires_grad_()
    permuted, permuted_probs, index = moe_utils.permute(
        tokens, routing, probs=probs, num_out_tokens=TOKENS * TOP_K, fused=fused
    )
    restored = moe_utils.unpermute(
        permuted * permuted_probs[:, None], index, tokens.shape, routing_map=routing, fused=fused
    )
    return [permuted, permuted_probs, restored, *_gradients([restored], [tokens, probs])]


def chunks(fused: bool) -> list[torch.Tensor]:
    """Reorder chunks. Returns the results and the gradients of their contents."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(10, HIDDEN, generator=generator).requires_grad_()
    probs = torch.rand(10, generator=generator).requires_grad_()
    sizes, order = torch.tensor([3, 0, 5, 2]), torch.tensor([2, 0, 3, 1])
    sorted_tokens, sorted_probs = moe_utils.sort_chunks_by_idxs(tokens, sizes, order, probs=probs, fused=fused)
    outputs = [sorted_tokens, sorted_probs]
    return [*outputs, *_gradients(outputs, [tokens, probs])]


def router(fused: bool) -> list[torch.Tensor]:
    """Return the router's logits and gradients. Uses TransformerEngine's product even if Megatron does not find it."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, **options: Any) -> Any:
        return general_gemm(a, b, out_dtype=dtype, **options)

    moe_utils.te_general_gemm = (FOUND or product) if fused else None
    generator = torch.Generator().manual_seed(3)
    tokens, weight = (
        torch.randn(shape, generator=generator).requires_grad_() for shape in ((TOKENS, HIDDEN), (EXPERTS, HIDDEN))
    )
    logits = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
    return [logits, *_gradients([logits], [tokens, weight])]


def compare_paths() -> Iterator[dict[str, Any]]:
    """Yield each case with the relative errors of its results."""
    for case in (there_and_back, chunks, router):
        errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(case(True), case(False), strict=True)]
        yield {"case": case.__name__, "errors": errors, "found": FOUND is not None}
