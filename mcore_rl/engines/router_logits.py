"""Logits of routers in float32 (model.float32_router), as the trainer computes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def router_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute hidden @ weight^T + bias in float32, from operands in the model's dtype.

    Products of 16-bit numbers are exact in float32, in which they are added.

    Shapes: hidden [tokens, h]; weight [experts, h]; bias [experts] -> float32 [tokens, experts].
    """
    if hidden.is_cuda and hidden.dtype == weight.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = F.linear(hidden.float(), weight.float())
    return logits if bias is None else logits + bias.float()
