"""Routers of vLLM 0.32 in float32 (model.float32_router).

Importing this module changes vLLM's GateLinear, which is the router of every family, for engines that start with
ADDITIONAL_CONFIG. Without it, the router computes in its own dtype, and logits that a family declares as float32 are
rounded to bfloat16 before on CPU.
"""

from __future__ import annotations

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

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


GateLinear.__init__ = _init
FusedMoEConfig.__post_init__ = _post_init
