"""RMSNorm of the local layer spec."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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

    def factor(self) -> torch.Tensor:
        """Return the factor of the normalized elements [hidden_size]."""
        return self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu" or not supports(x):
            return self.plain(x)
        from mcore_rl.megatron.cpu.kernels.norm import rms_norm

        return rms_norm(x, self.factor(), self.eps)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the norm with torch's own kernel."""
        return F.rms_norm(x, self.normalized_shape, self.factor(), self.eps)


class ZeroCenteredRMSNorm(LocalRMSNorm):
    """RMSNorm whose factor is 1 + weight, like TransformerEngine's with layernorm_zero_centered_gamma."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def factor(self) -> torch.Tensor:
        # In bfloat16 the sum would lose the last bits of the weight.
        return 1 + self.weight.float()

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return super().plain(x.float()).to(x.dtype)


def local_norm(config: TransformerConfig) -> type[LocalRMSNorm]:
    """Return the class of the model's norms in local layers."""
    return ZeroCenteredRMSNorm if config.layernorm_zero_centered_gamma else LocalRMSNorm
