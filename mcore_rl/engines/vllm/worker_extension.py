"""Methods for weight updates that vLLM adds to each of its workers (worker_extension_cls).

Weights go through vLLM's layer-wise reload: when all of a module's slices are received, vLLM converts the module to its
kernels' layout and copies it to the memory that the kernels read.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from mcore_rl.engines.kept_slices import ConnectedRank, connect_rank
from mcore_rl.engines.kv_memory import FreedStorages, free_storages, restore_storages
from mcore_rl.engines.vllm import cpu, sampler  # noqa: F401  (importing them patches vLLM)
from mcore_rl.engines.vllm.held_weights import held_modules, held_tensors
from mcore_rl.engines.vllm.ranks import RankMethods
from mcore_rl.engines.vllm.routing import RoutingExtension
from mcore_rl.engines.vllm.slice_loader import SliceLoader, record_kept_slices
from mcore_rl.weights.connection import Connection
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.transports.hosts import this_host
from mcore_rl.weights.transports.segments import SHARED_MEMORY, device_uuid
from mcore_rl.weights.transports.topology import Endpoint
from mcore_rl.weights.verify import Comparison, compare

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class WeightReceiverExtension(RankMethods, RoutingExtension):
    """Mixin for vLLM's Worker; one instance per engine rank. Its names must not occur in Worker."""

    vllm_config: VllmConfig
    model_runner: GPUModelRunner
    _connected: ConnectedRank
    _slice_loader: SliceLoader | None = None
    _freed: FreedStorages

    def prepare_cpu_worker(self) -> None:
        """Work around bugs of vLLM 0.32 on CPU. Called once on every rank, after all have started."""
        # vLLM never removes its segments for the CPU all-reduce from /dev/shm; all ranks have mapped them by now.
        for path in SHARED_MEMORY.glob(f"{os.environ['VLLM_DIST_IDENT']}-*cpushm*"):
            path.unlink(missing_ok=True)
        for module in self._model.modules():
            # The CPU kernel of interleaved rotary embeddings silently computes wrong results with several heads.
            if isinstance(module, RotaryEmbeddingBase) and not module.is_neox_style:
                module._forward_method = module.forward_native

    def endpoint(self) -> Endpoint:
        """Return this rank's endpoint for weight updates."""
        return Endpoint(this_host(), os.environ["VLLM_HOST_IP"], device_uuid())

    def connect_weights(self, connection: Connection, first_rank: int) -> None:
        """Connect to the sync, see connect_rank."""
        parallel = self.vllm_config.parallel_config
        layout = EngineLayout(
            tp=parallel.tensor_parallel_size,
            dp=parallel.data_parallel_size,
            pp=parallel.pipeline_parallel_size,
            expert_parallel=parallel.enable_expert_parallel,
        )
        with self._engine_context():
            if self._slice_loader is not None:
                self._slice_loader.discard()
            self._connected = connect_rank(
                connection, layout, self.rank, first_rank, lambda specs: record_kept_slices(self._model, specs)
            )
            self._slice_loader = SliceLoader(self._model, self.vllm_config, self._connected.kept)

    def begin_update(self) -> None:
        self._connected.receiver.begin()
        with self._engine_context():
            self._loader.begin()

    def receive_bucket(self, sync_round: int) -> int:
        """Receive and load one round of the plan. Returns its bytes."""
        with self._engine_context():
            return self._connected.receiver.receive(sync_round, self._loader.put)

    def finish_update(self) -> None:
        """Finish the update.

        Raises: WeightSyncError if a part that this rank keeps was not received.
        """
        self._connected.receiver.finish()
        with self._engine_context():
            self._loader.finish()

    def compare_weights(self) -> Comparison:
        """Compare the weights of this rank's kernels with the trainer's digests, one module at a time."""
        expected = self._connected.receiver.digests()
        with self._engine_context():
            held = (each for name in held_modules(self._model) for each in held_tensors(self._model, name))
            return compare(expected, held, self._connected.boxes)

    @property
    def _loader(self) -> SliceLoader:
        assert self._slice_loader is not None, "connect_weights has not been called"
        return self._slice_loader

    def free_device_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def release_kv_cache(self) -> int:
        """Free the memory of the KV cache but keep its tensors. Returns the freed bytes."""
        self._freed = free_storages(self.model_runner.kv_caches)
        return sum(num_bytes for _, num_bytes in self._freed)

    def restore_kv_cache(self) -> None:
        restore_storages(self._freed)

    @property
    def _model(self) -> torch.nn.Module:
        return self.model_runner.get_model()

    def _engine_context(self) -> AbstractContextManager[None]:
        return set_current_vllm_config(self.vllm_config)
