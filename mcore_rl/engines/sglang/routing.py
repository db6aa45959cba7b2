"""Router replay with SGLang: the experts that its layers chose for every token (runs in SGLang's environment).

SGLang 0.5.23 keeps them next to its KV cache and returns them when a request ends. For a running request they are read
from the same cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BatchTokenIDOutput
    from sglang.srt.managers.scheduler import Scheduler


class Routing:
    """Experts of the requests of SGLang's `scheduler`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        experts = [
            module for module in scheduler.tp_worker.model_runner.model.modules() if isinstance(module, FusedMoE)
        ]
        self._layers = sorted(module.layer_id for module in experts)
        # On GPUs SGLang adds DeepSeek-V3's shared expert to the 256 routed ones, and returns the routed ones only.
        num_routed = max(module.num_experts - module.num_fused_shared_experts for module in experts)
        self._dtype = np.uint8 if num_routed <= 256 else np.int16
        self._ended: dict[str, np.ndarray] = {}

    def forget(self) -> None:
        """Drop the experts of finished requests."""
        self._ended = {}

    def keep(self, outputs: Sequence[BatchTokenIDOutput]) -> None:
        """Keep the experts of requests that finished in this step."""
        # A finished request has left the KV cache, so SGLang returns its experts with the output.
        for output in outputs:
            for engine_id, experts in zip(output.rids, output.routed_experts or (), strict=False):
                if experts is not None:
                    self._ended[engine_id] = self._rows(experts)

    def of(self, engine_ids: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the experts of all tokens except the last, for requests that are running or finished since `forget`.

        Requests that are waiting are absent: not all their tokens are computed.
        Shapes: [tokens, layers with experts, k].
        """
        running = {request.rid: request for request in self._scheduler.collect_inflight_reqs()}
        known = {i: self._ended[i] for i in engine_ids if i in self._ended}
        for engine_id in engine_ids:
            request = running.get(engine_id)
            if request is not None and engine_id not in known:
                tokens = len(request.origin_input_ids) + len(request.output_ids)
                capturer, pool = get_global_experts_capturer(), self._scheduler.req_to_token_pool
                known[engine_id] = self._rows(capturer.get_topk(request.kv.req_pool_idx, tokens, pool))
        return known

    def _rows(self, experts: torch.Tensor) -> np.ndarray:
        """Drop the layers without experts."""
        rows: np.ndarray = experts[:, self._layers].numpy().astype(self._dtype)
        return rows
