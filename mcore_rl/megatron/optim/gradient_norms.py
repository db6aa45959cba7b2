"""Gradient norms by kind of module, to see which modules dominate an update or have exploding gradients.

Each gradient is counted once over all ranks, with Megatron's rules for tied embeddings and for parameters replicated
over tensor-parallel ranks. The squares of all kinds therefore add up to the square of the norm used for clipping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from mcore_rl.megatron.model.shards import replicas_of
from mcore_rl.megatron.optim.main_params import main_parameters, optimizer_parts
from mcore_rl.types import Root

# In this order: MTP layers and vision towers contain all other kinds, and names of routers and experts contain `mlp.`.
_PARTS = (
    ("mtp.", "mtp"),
    ("vision.", "vision"),
    ("embedding.", "embedding"),
    ("embed_tokens.", "embedding"),
    ("output_layer.", "output"),
    ("lm_head.", "output"),
    ("score.", "output"),
    ("router.", "router"),
    ("mlp.gate.", "router"),
    ("norm", "norm"),
    ("self_attention.", "attention"),
    ("self_attn.", "attention"),
    ("experts.", "experts"),
    ("mlp.", "mlp"),
)
"""Substring of a parameter's name in Megatron's model or in transformers' -> kind; the first match counts."""


def kind_of(name: str) -> str:
    """Return the kind of module of a parameter. Norms that TransformerEngine fuses into a projection
    (`layer_norm_weight`) count as norms, shared experts as experts."""
    return next((kind for part, kind in _PARTS if part in name), "other")


def gradient_norms(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, *, scale: float = 1.0
) -> dict[str, Root]:
    """Compute this rank's part of the gradient norm of each kind of module, before clipping, without the loss scale
    `scale`. Merging the parts of all ranks gives the exact norm. Call it between the gradient reduction and the
    optimizer step. `chunks` are from wrap_chunks. Not collective."""
    kinds = {id(parameter): kind_of(name) for chunk in chunks for name, parameter in chunk.named_parameters()}
    squares: dict[str, list[torch.Tensor]] = {}
    for part in optimizer_parts(optimizer):
        for gradient, parameter in _counted_on_rank(part):
            # Divided before it is squared: the square of a scaled norm may exceed float32.
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32) / scale
            squares.setdefault(kinds[id(parameter)], []).append(norm.square())
    if not squares:
        return {}
    # One device-to-host transfer instead of one per kind.
    sums = torch.stack([torch.stack(terms).sum(dtype=torch.float64) for terms in squares.values()]).tolist()
    return dict(zip(squares, map(Root, sums), strict=True))


def _counted_on_rank(part: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (gradient of the elements that this rank owns, parameter), without elements that another rank counts."""
    tp_group = getattr(part, "tp_group", None)
    for owned in main_parameters(part):
        parameter = owned.model
        if not owned.sharded and replicas_of(parameter).rank():
            continue
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, tp_group):
            # main_grad has the parameter's shape; the optimizer owns a range of its elements.
            yield parameter.main_grad.view(-1)[owned.start : owned.stop], parameter
