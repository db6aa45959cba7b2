"""Expert parallelism for vLLM's CPU experts (0.32).

vLLM passes them the map from the model's expert numbers to the rank's own, but they ignore it: experts of other ranks
would index memory behind the weights. Importing this module makes them apply the map.
"""

from __future__ import annotations

import inspect

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.platforms import current_platform

_upstream = CPUUnquantizedExperts.apply
_signature = inspect.signature(_upstream)


def own_experts(
    expert_map: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map the chosen experts to this rank's numbers. Experts of other ranks become expert 0 with weight 0.

    The other ranks add their experts' outputs in the all-reduce.

    Shapes: expert_map [experts of the model], -1 for other ranks'; topk_ids, topk_weights [tokens, k].
    """
    own = expert_map[topk_ids.long()]
    return own.clamp(min=0).to(topk_ids.dtype), torch.where(own < 0, 0.0, topk_weights)


def apply(self: CPUUnquantizedExperts, *args: object, **kwargs: object) -> None:
    """Replacement of CPUUnquantizedExperts.apply."""
    call = _signature.bind(self, *args, **kwargs)
    given = call.arguments
    if given["expert_map"] is not None:
        ids, weights = own_experts(given["expert_map"], given["topk_ids"], given["topk_weights"])
        given["topk_ids"], given["topk_weights"] = ids, weights
    _upstream(*call.args, **call.kwargs)


if current_platform.is_cpu():
    CPUUnquantizedExperts.apply = apply
