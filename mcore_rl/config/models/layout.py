"""Layout of a model on Megatron ranks, and the memory that it leaves while an engine generates."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.fields import setting


@dataclass
class ParallelConfig:
    tp: int = setting(1, minimum=1)
    """Tensor-parallel size."""
    pp: int = setting(1, minimum=1)
    """Number of pipeline stages."""
    vpp: int | None = setting(None, minimum=1)
    """Model chunks per pipeline stage for the interleaved schedule; null: one."""
    ep: int = setting(1, minimum=1)
    """Expert-parallel size."""
    etp: int | None = setting(None, minimum=1)
    """Tensor-parallel size of the experts; null: 1 for mixture-of-experts models with ep > 1, else tp."""
    cp: int = setting(1, minimum=1)
    """Context-parallel size: ranks that share a packed row; sequences are padded to multiples of 2 * cp tokens."""
    first_stage_layers: int | None = setting(None, minimum=1)
    """Layers of the first pipeline stage; null: same as the other stages."""
    last_stage_layers: int | None = setting(None, minimum=1)
    """Layers of the last pipeline stage; null: same as the other stages."""
    pipeline_layout: str | None = None
    """Megatron's pipeline layout string, such as `E|(tt|)*30tL`, with pp x vpp stages. Replaces first_stage_layers,
    last_stage_layers and vpp."""
    sequence_parallel: bool | None = None
    """Use sequence parallelism; null: if tp > 1. Mixture-of-experts and latent-attention models compute wrong results
    without it."""
    shard_parameters: bool = False
    """Divide parameters and gradients over data-parallel ranks too; each layer is gathered for its passes (FSDP)."""


@dataclass
class OffloadConfig:
    """Parts of a model that move to host memory while the engine generates, and back before the trainer's next pass."""

    params: bool = False
    """Offload the weights."""
    grads: bool = False
    """Offload the gradient buffers."""
    optimizer: bool = False
    """Offload the optimizer state."""
