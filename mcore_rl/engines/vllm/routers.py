"""Routers of vLLM 0.32: their correction bias on CPU, and products in float32 (model.float32_router). Importing this
module changes vLLM.

Bias: vLLM's router for CPUs applies it only if experts are chosen in groups. Without groups it silently ignores the
bias of softmax scores (ERNIE 4.5) and rejects sigmoid scores with an assertion without message (MiniMax-M2). Here such
a router chooses in one group that contains all experts, which is the same as no group.

float32: GateLinear is the router of every family. By default it computes in its own dtype, and on CPU logits that a
family declares as float32 are rounded to bfloat16 before. Engines that start with ADDITIONAL_CONFIG compute them in
float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter, _grouped_topk
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms import current_platform

from mcore_rl.engines.router_logits import router_logits

ADDITIONAL_CONFIG = {"mcore_rl_float32_router": True}
"""Value of the engine argument `additional_config`, which reaches the workers."""


class Float32RouterMethod(UnquantizedLinearMethod):
    """Keeps the weight as it is loaded, and multiplies in float32."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing: vLLM would pack the weight for products in its dtype."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return router_logits(x, layer.weight, bias)


def _is_on() -> bool:
    return all(get_current_vllm_config().additional_config.get(key) for key in ADDITIONAL_CONFIG)


_upstream_init = GateLinear.__init__
_upstream_post_init = FusedMoEConfig.__post_init__


def _init(self: GateLinear, *args: object, **kwargs: object) -> None:
    """Wrap GateLinear.__init__. With float32 results, it chooses vLLM's float32 kernels on GPUs that have them; the
    method serves all other passes."""
    if not _is_on():
        _upstream_init(self, *args, **kwargs)
        return
    _upstream_init(self, *args, **(kwargs | {"out_dtype": torch.float32}))
    if self.is_unquantized:
        self.quant_method = Float32RouterMethod()


def _post_init(self: FusedMoEConfig) -> None:
    """Wrap FusedMoEConfig.__post_init__. vLLM selects kernels of experts by the dtype of the router's logits, which
    most families leave at the model's dtype."""
    if _is_on():
        self.router_logits_dtype = torch.float32
    _upstream_post_init(self)


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


GateLinear.__init__ = _init
FusedMoEConfig.__post_init__ = _post_init
# Workers on GPUs import this module too.
if current_platform.is_cpu():
    CPURouter._compute_routing = with_correction_bias(CPURouter._compute_routing)
