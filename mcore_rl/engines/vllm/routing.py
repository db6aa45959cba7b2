"""vLLM's side of router replay: which experts its layers chose for every token of a request.

On GPUs vLLM 0.32 hands them over itself (enable_return_routed_experts). On CPU it does not, but its routers call a
function that is set, and a pass knows the cache slot of each of its rows: RoutingCache does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.kv_cache_interface import FullAttentionSpec

from mcore_rl.engines.routing_cache import RoutingCache
from mcore_rl.errors import ConfigError


class RoutingExtension:
    """Mixed into vllm's Worker; one instance per engine rank. Ranks of one engine route alike: rank 0 keeps it."""

    model_runner: Any
    rank: int
    _routing_cache: RoutingCache

    def routed_layers(self) -> list[int]:
        """Numbers of the layers with experts, ascending."""
        return [runner.layer_id for runner in _runners(self.model_runner.get_model())]

    def start_routing_capture(self) -> None:
        """From now on every pass leaves its experts; on CPU.

        Raises: ConfigError for a model whose routing cannot be read.
        """
        runners = _runners(self.model_runner.get_model())
        _check_readable(runners)
        if self.rank:
            return
        self._routing_cache = self._build_routing_cache(runners)
        for place, runner in enumerate(runners):
            runner.router.set_capture_fn(partial(self._keep_routing, place))

    def routing_of_requests(self, num_tokens: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Experts of the first num_tokens[request] tokens: [tokens, layers with experts, k] by request.

        To be called before the pass after the one that ended the requests: then their blocks belong to others.
        """
        if self.rank:
            return {}
        known = self.model_runner.requests
        return {
            request: self._routing_cache.read(known[request].block_ids[0], count)
            for request, count in num_tokens.items()
        }

    def _build_routing_cache(self, runners: list[Any]) -> RoutingCache:
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
            raise ConfigError(
                "actor.moe.router_replay=engine: the model frees parts of its cache before a response is complete, and "
                "their experts with them; set it to policy or none"
            )
        router = runners[0].router
        return RoutingCache(
            self.model_runner.kv_cache_config.num_blocks,
            groups[0].kv_cache_spec.block_size,
            num_layers=len(runners),
            topk=router.top_k,
            num_experts=router.global_num_experts,
        )

    def _keep_routing(self, place: int, experts: torch.Tensor) -> None:
        slots = get_forward_context().slot_mapping
        if not slots:
            return  # a pass that only measures memory or warms up
        assert isinstance(slots, dict)  # a list only where a pass is cut in two, which CPUs do not do
        self._routing_cache.write(place, next(iter(slots.values())), experts)


def _runners(model: torch.nn.Module) -> list[Any]:
    """The model's layers with experts, from first to last."""
    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    return sorted(runners, key=lambda runner: runner.layer_id)


def _check_readable(runners: list[Any]) -> None:
    readable = [isinstance(runner.router, BaseRouter) and not runner._quant_method.is_monolithic for runner in runners]
    if not runners or not all(readable):
        kinds = sorted({type(runner.router).__name__ for runner in runners}) or ["none"]
        raise ConfigError(
            f"actor.moe.router_replay=engine: vLLM does not show what this model's routers ({', '.join(kinds)}) "
            "choose; set it to policy or none"
        )
