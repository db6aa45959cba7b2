"""RMSNorm of the local layer spec."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.megatron.cpu.kernels import supports


class LocalRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that a layer spec calls.

    WrappedTorchNorm of megatron-core 0.16.1 rejects sequence parallelism. Supporting it needs only the attribute
    `weight.sequence_parallel`: finalize_model_grads then sums the weight's gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            return super().forward(x)
        from mcore_rl.megatron.cpu.kernels.norm import rms_norm

        return rms_norm(x, self.weight, self.eps) if supports(x) else super().forward(x)
