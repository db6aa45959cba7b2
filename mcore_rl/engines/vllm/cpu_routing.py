"""Correction bias of routers without expert groups in vLLM 0.32 on CPU.

vLLM's router for CPUs applies the bias only if experts are chosen in groups. Without groups it silently ignores the
bias of softmax scores (ERNIE 4.5) and rejects sigmoid scores with an assertion without message (MiniMax-M2). Importing
this module makes such a router choose in one group that contains all experts, which is the same as no group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter, _grouped_topk
from vllm.platforms import current_platform

_Routing = tuple[torch.Tensor, torch.Tensor]


def with_correction_bias(upstream: Callable[..., _Routing]) -> Callable[..., _Routing]:
    """Return a method that replaces `upstream`, CPURouter's method: it applies the correction bias without groups too,
    and supports sigmoid scores."""

    def compute_routing(self: CPURouter, *args: object, **kwargs: object) -> _Routing:
        known = self.use_grouped_topk or self.custom_routing_function is not None
        unbiased_softmax = self.scoring_func == "softmax" and self.e_score_correction_bias is None
        if known or unbiased_softmax or self.scoring_func not in ("softmax", "sigmoid"):
            return upstream(self, *args, **kwargs)
        logits = kwargs["router_logits"] if "router_logits" in kwargs else args[1]
        assert isinstance(logits, torch.Tensor)
        routing: _Routing = _grouped_topk(
            logits,
            topk=self.top_k,
            renormalize=self.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func=self.scoring_func,
            routed_scaling_factor=self.routed_scaling_factor,
            e_score_correction_bias=self.e_score_correction_bias,
        )
        return routing

    return compute_routing


# Workers on GPUs import this module too.
if current_platform.is_cpu():
    CPURouter._compute_routing = with_correction_bias(CPURouter._compute_routing)
