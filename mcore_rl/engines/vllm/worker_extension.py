"""vLLM's side of a hand-over: methods that vLLM adds to each of its workers (worker_extension_cls).

Weights go through vLLM's layer-wise reload: a module is built anew in the kernels' layout once all its tensors have
come, then copied into the memory that the kernels read.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from mcore_rl.engines.vllm import cpu as vllm_cpu  # noqa: F401  (every engine rank registers its kernels)
from mcore_rl.engines.vllm.held_weights import HeldTensor, derived_parameters, held_modules, held_tensors, tied_head
from mcore_rl.engines.vllm.ranks import RankMethods
from mcore_rl.engines.vllm.routing import RoutingExtension
from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.plan import BucketSpec
from mcore_rl.weights.receive import BucketReceiver, NamedTensors
from mcore_rl.weights.transports.shared_memory import SHARED_MEMORY, SharedBuckets


class BucketReceiverExtension(RankMethods, RoutingExtension):
    """Mixed into vllm's Worker; one instance per engine rank. Names must not occur in Worker."""

    vllm_config: VllmConfig
    model_runner: Any
    _buckets: SharedBuckets | None = None
    _bucket_receiver: BucketReceiver
    _bucket_params: set[str]
    _reload_begun: bool = False
    _kv_cache_bytes: list[int]

    def prepare_cpu_worker(self) -> None:
        """Mends what vLLM 0.32 does wrongly on CPU; called once on every rank, when all have started."""
        # Its segments of CPU all-reduce stay in /dev/shm for ever; every rank has mapped them by now.
        for path in SHARED_MEMORY.glob(f"{os.environ['VLLM_DIST_IDENT']}-*cpushm*"):
            path.unlink(missing_ok=True)
        for module in self._bucket_model.modules():
            # The kernel of interleaved rotary embeddings is wrong for several heads, silently.
            if isinstance(module, RotaryEmbeddingBase) and not module.is_neox_style:
                module._forward_method = module.forward_native

    def attach(self, spec: BucketSpec) -> None:
        self._discard_reload()
        if self._buckets is not None:
            self._bucket_receiver.detach()
            self._buckets.close()
        self._buckets = SharedBuckets.attach(spec)
        self._bucket_receiver = BucketReceiver(self._buckets, self._keep_pending)

    def begin_update(self) -> None:
        self._discard_reload()
        self._bucket_receiver.begin()
        model = self._bucket_model
        self._bucket_params = {name for name, _ in model.named_parameters()} - derived_parameters(model)
        self._reload_begun = True
        with self._bucket_context():
            for module in model.modules():
                # vLLM 0.32 repacks experts only when it builds their kernel: without this the second load leaves
                # unpacked weights under a kernel that expects packed ones, silently.
                if isinstance(module, RoutedExperts) and current_platform.is_cpu():
                    module.quant_method.moe_kernel = None
            initialize_layerwise_reload(model)

    def receive_bucket(self, index: int) -> int:
        """Loads bucket `index` of the plan; returns its bytes."""
        with self._bucket_context():
            return self._bucket_receiver.receive(index, self._load_batch)

    def finish_update(self) -> None:
        """Raises: WeightSyncError when parameters of the model received nothing."""
        self._bucket_receiver.finish()
        model = self._bucket_model
        if self._bucket_params:
            raise WeightSyncError(f"the update brought nothing for {', '.join(sorted(self._bucket_params))}")
        with self._bucket_context():
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            head = tied_head(model)
            if head is not None:
                # The reload sees a tied head as a layer without tensors and leaves its packed copy as it was.
                head.quant_method.process_weights_after_loading(head)
        self._reload_begun = False

    def _discard_reload(self) -> None:
        """Takes back a reload that was begun and not finished: vLLM would go on in it, with layers that are under way
        and their counts, and be silently wrong. What the kernels hold is then of two versions, until a whole update.

        Nothing is processed, as finishing would: of a layer that failed half way it could make anything.
        """
        if not self._reload_begun:
            return
        assert self._buckets is not None
        model = self._bucket_model
        with self._bucket_context():
            for layer in model.modules():
                info = get_layerwise_info(layer)
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                    info.reset()
            finalize_layerwise_reload(model, self.vllm_config.model_config)
        self._bucket_receiver = BucketReceiver(self._buckets, self._keep_pending)
        self._reload_begun = False

    def free_device_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def release_kv_cache(self) -> int:
        """Takes the memory from under the KV cache, whose tensors stay; returns its bytes."""
        storages = self._kv_storages()
        self._kv_cache_bytes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)
        return sum(self._kv_cache_bytes)

    def restore_kv_cache(self) -> None:
        """Gives it back, zero, as vLLM allocates it: attention multiplies also what it masks."""
        for storage, num_bytes in zip(self._kv_storages(), self._kv_cache_bytes, strict=True):
            storage.resize_(num_bytes)
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()

    def _kv_storages(self) -> list[torch.UntypedStorage]:
        """Of all layers, which may share one."""
        storages = [tensor.untyped_storage() for tensor in self.model_runner.kv_caches]
        return list({storage._cdata: storage for storage in storages}.values())

    def held_weight_modules(self) -> list[str]:
        """Names of the modules with weights; the same on every rank."""
        return held_modules(self._bucket_model)

    def held_weights(self, module: str) -> list[HeldTensor]:
        """What this rank's kernels compute with in one module, as shards of HF tensors, in host memory: a tensor of a
        device is pickled with that device, and those of several cannot be joined."""
        with self._bucket_context():
            held = held_tensors(self._bucket_model, module)
        return [replace(shard, tensor=shard.tensor.cpu()) for shard in held]

    @property
    def _bucket_model(self) -> torch.nn.Module:
        return self.model_runner.get_model()

    def _bucket_context(self) -> AbstractContextManager[None]:
        return set_current_vllm_config(self.vllm_config)

    def _load_batch(self, tensors: NamedTensors) -> None:
        self._bucket_params -= self._bucket_model.load_weights(iter(tensors))

    def _keep_pending(self, arena: torch.Tensor) -> None:
        """Modules that are not complete hold references into the arena, which is about to change: a vocabulary
        padded by vLLM is complete only at the end of the update. They get copies of their own."""
        memory = _memory(arena)
        for layer in self._bucket_model.modules():
            for _, bound in get_layerwise_info(layer).loaded_weights:
                for key, value in bound.arguments.items():
                    if isinstance(value, torch.Tensor) and not value.is_meta and _memory(value) == memory:
                        bound.arguments[key] = value.clone()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
