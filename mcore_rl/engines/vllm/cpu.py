"""Compiled norms and expert parallelism for vLLM 0.32 on CPU.

Importing this module
- registers vLLM's own compiled norms, which the engine argument IR_OP_PRIORITY selects: otherwise vLLM runs norms in
  eager torch on CPU;
- makes vLLM's CPU experts apply the map from the model's expert numbers to the rank's own. They get it but ignore it:
  experts of other ranks would index memory behind the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.functional import linear, silu
from vllm import ir
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.platforms import current_platform

PROVIDER = "mcore_rl_cpu"
IR_OP_PRIORITY = {"rms_norm": [PROVIDER, "native"], "fused_add_rms_norm": [PROVIDER, "native"]}
"""Needed because vLLM registers its compiled norms only for GPUs, although its CPU build contains them."""


_LANES = 8
"""Vector length of the kernels. They reject rows whose length is not a multiple."""


def _supports_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.shape[-1] % _LANES == 0


def _supports_fused_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _supports_norm(x, weight, epsilon, variance_size)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    x = x.contiguous()  # the kernel ignores strides
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, x_residual = x.contiguous(), x_residual.contiguous()
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def own_experts(
    expert_map: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map the chosen experts to this rank's numbers. Experts of other ranks become expert 0 with weight 0.

    The other ranks add their experts' outputs in the all-reduce.

    Shapes: expert_map [experts of the model], -1 for other ranks'; topk_ids, topk_weights [tokens, k].
    """
    own = expert_map[topk_ids.long()]
    return own.clamp(min=0).to(topk_ids.dtype), torch.where(own < 0, 0.0, topk_weights)


def mapping_experts(apply: Callable[..., None]) -> Callable[..., None]:
    """Return a method for a class of experts: `apply` with this rank's numbers of experts.

    vLLM passes all arguments by name; the method runs in every layer of every pass, and binding them would take 3 % of
    a pass of a tiny model.
    """

    def apply_own(self: object, **given: Any) -> None:
        if (expert_map := given["expert_map"]) is not None:
            given["topk_ids"], given["topk_weights"] = own_experts(expert_map, given["topk_ids"], given["topk_weights"])
        apply(self, **given)

    return apply_own


def add_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    matrices: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Write the weighted sum of the chosen experts' outputs, computed in plain torch.

    matrices: returns gate and up together, and down, of a rank's expert in the dtype of `hidden_states`.
    Shapes: output, hidden_states [tokens, hidden]; topk_weights, topk_ids [tokens, k]; matrices [2 * inner, hidden] and
    [hidden, inner].
    """
    total = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
        gate_up, down = matrices(expert)
        gate, up = linear(hidden_states[tokens], gate_up).chunk(2, dim=-1)
        result = linear(silu(gate) * up, down)
        total.index_add_(0, tokens, result.float() * topk_weights[tokens, choices, None])
    output.copy_(total)


class QuantisedExperts(Protocol):
    """Scales of a class of vLLM's experts, by expert."""

    w1_scale: torch.Tensor
    w2_scale: torch.Tensor


def quantised_experts(
    dequantised: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor],
) -> Callable[..., None]:
    """Return a method `apply` for a class of quantised experts, in plain torch.

    dequantised: returns the values of the codes and scales of a matrix, in a dtype.
    """

    def apply(
        self: QuantisedExperts,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        **unused: object,
    ) -> None:
        """Shapes: output, hidden_states [tokens, hidden]; w1, w2: codes of gate and up, and of down, [experts, ...]."""
        if apply_router_weight_on_input:
            raise NotImplementedError("quantised experts do not support apply_router_weight_on_input")
        dtype = hidden_states.dtype

        def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            gate_up = dequantised(w1[expert], self.w1_scale[expert], dtype)
            return gate_up, dequantised(w2[expert], self.w2_scale[expert], dtype)

        add_experts(output, hidden_states, topk_weights, topk_ids, matrices)

    return apply


# Workers on GPUs import this module too.
if current_platform.is_cpu():
    CPUUnquantizedExperts.apply = mapping_experts(CPUUnquantizedExperts.apply)
    current_platform.import_kernels()
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_supports_norm)(rms_norm)
    register = ir.ops.fused_add_rms_norm.register_impl
    register(PROVIDER, supports_args=_supports_fused_norm, inplace=True)(fused_add_rms_norm)
