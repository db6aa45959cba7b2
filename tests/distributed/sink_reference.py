"""Attention of transformers' gpt-oss for packed rows with sinks and windows, and inputs for comparisons with it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

GROUPS = 2
SINKS = (0.3, 6.0, -1.0, -30.0)
"""One per head. One sink dominates the softmax, and one is negligible."""
LENGTHS = (3, 200, 128, 1, 129, 127, 300)


def row(width: int, value_width: int | None = None, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return query [T, heads, width], key and value [T, groups, ...] of LENGTHS, and SINKS."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(len(SINKS), width), (GROUPS, width), (GROUPS, value_width or width)]
    tensors = [torch.randn((sum(LENGTHS), *shape), generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in (*tensors, torch.tensor(SINKS, dtype=torch.float64))]


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Compute attention sequence by sequence, with a mask like transformers' own. Shapes: as flash_attention."""
    outputs = []
    for each in zip(*(x.split(LENGTHS) for x in (query, key, value)), strict=True):
        length = len(each[0])
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (length if window is None else window))
        mask = torch.zeros(length, length, dtype=query.dtype).masked_fill(hidden, -torch.inf)
        module = SimpleNamespace(num_key_value_groups=len(SINKS) // GROUPS, sinks=sinks, training=False)
        states = (x.transpose(0, 1)[None] for x in each)
        scale = query.shape[-1] ** -0.5
        outputs.append(eager_attention_forward(module, *states, mask[None, None], scaling=scale)[0][0])
    return torch.cat(outputs)


def loss_weights(out: torch.Tensor) -> torch.Tensor:
    """Fixed random weights of a sum of the output's elements."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64).to(out)


def gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the inputs if the loss is the output's sum with loss_weights."""
    return torch.autograd.grad((out * loss_weights(out)).sum(), inputs)
