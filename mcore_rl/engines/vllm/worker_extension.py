"""Methods for weight updates that vLLM adds to each of its workers (worker_extension_cls).

Weights go through vLLM's layer-wise reload: when all of a module's slices are received, vLLM converts the module to its
kernels' layout and copies it to the memory that the kernels read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.platforms import current_platform

from mcore_rl.engines.rank_memory import RankMemory
from mcore_rl.engines.vllm import (  # noqa: F401  (importing them patches vLLM)
    cpu,
    cpu_fp8,
    cpu_int4,
    draft_layers,
    drafts,
    routers,
)
from mcore_rl.engines.vllm.ranks import RankMethods
from mcore_rl.engines.vllm.routing import RoutingExtension
from mcore_rl.engines.vllm.sampler import SetExtension
from mcore_rl.engines.vllm.slice_loader import ReloadingLoader
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.transports.segments import SHARED_MEMORY

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class WeightReceiverExtension(RankMethods, RoutingExtension, SetExtension, RankMemory):
    """Mixin for vLLM's Worker; one instance per engine rank. Its names must not occur in Worker."""

    vllm_config: VllmConfig
    model_runner: GPUModelRunner

    def prepare_worker(self) -> None:
        """Prepare for weight updates, and work around bugs of vLLM 0.32 on CPU. Called once on every rank, after all
        have started."""
        parallel, model = self.vllm_config.parallel_config, self.model_runner.get_model()
        drafter = self.model_runner.get_draft_model()
        self._layout = EngineLayout(
            tp=parallel.tensor_parallel_size,
            dp=parallel.data_parallel_size,
            pp=parallel.pipeline_parallel_size,
            expert_parallel=parallel.enable_expert_parallel,
            draft_layers=drafter is not None,
        )
        if drafter is not None:
            model = draft_layers.WithDrafter(model, drafter)
        self._loader = ReloadingLoader(model, self.vllm_config)
        if not current_platform.is_cpu():
            return
        # vLLM never removes its segments for the CPU all-reduce from /dev/shm; all ranks have mapped them by now.
        for path in SHARED_MEMORY.glob(f"{os.environ['VLLM_DIST_IDENT']}-*cpushm*"):
            path.unlink(missing_ok=True)
        for module in model.modules():
            # The CPU kernel of interleaved rotary embeddings silently computes wrong results with several heads.
            if isinstance(module, RotaryEmbeddingBase) and not module.is_neox_style:
                module._forward_method = module.forward_native

    def free_device_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def _kv_caches(self) -> Iterable[torch.Tensor]:
        return self.model_runner.kv_caches
