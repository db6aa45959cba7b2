"""vLLM's Ray executor (RayExecutorV2 of 0.32) on the devices of this engine's process: its ranks are Ray actors, as
sharded_rdt needs them to be.

vLLM would look for a free GPU of Ray's, and for a bundle per rank. Here the engine's process has the GPUs already, in
the bundle of its host, and the run has placed it.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.util.placement_group import placement_group_table
from vllm.v1.executor import ray_executor_v2 as upstream
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

DEVICES = "MCORE_RL_ENGINE_DEVICES"
"""Environment variable of ranks: GPUs of the engine, separated by commas; empty on CPU."""


class RayRank(RayWorkerProc):  # type: ignore[misc]
    """A rank that is told its GPU instead of asking Ray."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        rank = self._init_kwargs["rank"]
        devices = [int(device) for device in os.environ[DEVICES].split(",") if device]
        return ray.get_runtime_context().get_node_id(), [devices[rank] if devices else rank]


class RayRanks(RayExecutorV2):  # type: ignore[misc]
    """All ranks beside the engine's process, on its host."""

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {"num_gpus": 0}

    def _build_runtime_env(self) -> dict[str, Any]:
        environment: dict[str, Any] = super()._build_runtime_env()
        variables = environment.setdefault("env_vars", {})
        variables[DEVICES] = ",".join(str(device) for device in ray.get_gpu_ids())
        # vLLM takes a rank to have an address of its own, and does not pass it on.
        variables["VLLM_HOST_IP"] = os.environ["VLLM_HOST_IP"]
        return environment

    def _init_executor(self) -> None:
        group, node = ray.util.get_current_placement_group(), ray.get_runtime_context().get_node_id()
        nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        bundle = next(index for index, of_bundle in nodes.items() if of_bundle == node)
        places = [(bundle, node, ray.util.get_node_ip_address())] * self.parallel_config.world_size
        self.parallel_config.placement_group = group
        names = {
            "initialize_ray_cluster": lambda *args, **kwargs: None,
            "get_bundles_sorted_by_node": lambda placement_group: places,
            "RayWorkerProc": RayRank,
        }
        before = {name: getattr(upstream, name) for name in names}
        vars(upstream).update(names)
        try:
            super()._init_executor()
        finally:
            vars(upstream).update(before)
