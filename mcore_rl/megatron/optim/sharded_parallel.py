"""Data parallelism with sharded parameters, with the interface of Megatron's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.megatron.model.output import unwrap
from mcore_rl.megatron.model.shards import local_part, local_shard, shard_parameters


class ShardedDataParallel(_BaseDataParallel):
    """A chunk whose parameters are sharded over data-parallel ranks (model/shards.py).

    Its `parameters` are this rank's shards as plain tensors, which share memory with the model's parameters. Megatron's
    optimizers, gradient norms and sums over tensor-parallel ranks therefore process shards without a gather. After
    finish_grad_sync `main_grad` of a shard is its gradient: a float32 sum over data-parallel ranks. Gradients have no
    memory outside of an update.

    Collective: the constructor and the passes, over all ranks.
    """

    def __init__(self, config: TransformerConfig, module: torch.nn.Module) -> None:
        super().__init__(config, module)
        # Megatron reads it in finalize_model_grads and in the construction of optimizers.
        self.ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        shard_parameters(unwrap(module))
        self._shards = [
            (f"module.{name}", parameter, shard)
            for name, parameter in module.named_parameters()
            if (shard := local_shard(parameter)) is not None
        ]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield this rank's shards."""
        yield from ((prefix + name, shard) for name, _, shard in self._shards)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Set `main_grad` of every trained shard. Each backward pass has reduced its gradients already."""
        del force_all_reduce
        for name, parameter, shard in self._shards:
            if parameter.requires_grad:
                assert parameter.grad is not None, f"{name} has no gradient"
                shard.main_grad = local_part(parameter.grad)  # type: ignore[attr-defined]

    def zero_grad_buffer(self) -> None:
        """Free all gradients."""
        for _, parameter, shard in self._shards:
            parameter.grad = shard.grad = None
            vars(shard).pop("main_grad", None)
