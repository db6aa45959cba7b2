"""Router replay with vLLM: the experts that its layers chose for every token.

On GPUs vLLM 0.32 returns them itself (enable_return_routed_experts). On CPU its routers only call a capture function;
with the KV cache slot of each row of a pass, RoutingCache assigns the experts to requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.kv_cache_interface import FullAttentionSpec

from mcore_rl.engines.routing_cache import RoutingCache
from mcore_rl.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class RoutingExtension:
    """Mixin for vLLM's Worker. All ranks of an engine choose the same experts, so only rank 0 records them."""

    model_runner: GPUModelRunner
    rank: int
    _routing_cache: RoutingCache

    def routed_layers(self) -> list[int]:
        """Return the numbers of the layers with experts, ascending."""
        return [runner.layer_id for runner in _runners(self.model_runner.get_model())]

    def start_routing_capture(self) -> None:
        """Record the experts of every later pass. CPU only.

        Raises: ConfigError for a model whose routing cannot be read.
        """
        runners, cache = _runners(self.model_runner.get_model()), self.model_runner.kv_cache_config
        if not runners or not all(
            isinstance(runner.router, BaseRouter) and not runner._quant_method.is_monolithic for runner in runners
        ):
            kinds = sorted({type(runner.router).__name__ for runner in runners}) or ["none"]
            raise ConfigError(
                f"actor.moe.router_replay=engine: vLLM does not expose the choices of this model's routers "
                f"({', '.join(kinds)}); set it to policy or none"
            )
        if self.rank:
            return
        if len(cache.kv_cache_groups) != 1 or not isinstance(cache.kv_cache_groups[0].kv_cache_spec, FullAttentionSpec):
            raise ConfigError(
                "actor.moe.router_replay=engine: the model frees parts of its KV cache before a response is complete, "
                "and the experts of their tokens with them; set it to policy or none"
            )
        self._routing_cache = RoutingCache(
            cache.num_blocks,
            cache.kv_cache_groups[0].kv_cache_spec.block_size,
            num_layers=len(runners),
            topk=runners[0].router.top_k,
            num_experts=runners[0].router.global_num_experts,
        )
        for layer, runner in enumerate(runners):
            runner.router.set_capture_fn(partial(self._keep_routing, layer))

    def routing_of_requests(self, num_tokens: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Return the experts of the first num_tokens[request] tokens, by request.

        Call before the pass that follows the end of a request: then its blocks are given to other requests.
        Shapes: [tokens, layers with experts, k].
        """
        if self.rank:
            return {}
        known = self.model_runner.requests
        return {
            request: self._routing_cache.read(known[request].block_ids[0], count)
            for request, count in num_tokens.items()
        }

    def _keep_routing(self, layer: int, experts: torch.Tensor) -> None:
        slots = get_forward_context().slot_mapping
        if not slots:
            return  # a profiling or warm-up pass
        assert isinstance(slots, dict)  # a list only with micro-batching, which is not used on CPU
        self._routing_cache.write(layer, next(iter(slots.values())), experts)


def _runners(model: torch.nn.Module) -> list[MoERunner]:
    """Return the model's layers with experts, from first to last."""
    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    # Modules are listed in the order of their registration, which need not be the order of the layers.
    return sorted(runners, key=lambda runner: runner.layer_id)
