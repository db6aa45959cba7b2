"""Start or join a Ray cluster, reserve its nodes, and leave nothing running."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_rl.config.schema import ClusterConfig
from mcore_rl.errors import ConfigError
from mcore_rl.runtime.daemons import (
    Daemons,
    Guard,
    daemons_killed_at_once,
    services_kept_from_ray,
    signals_kept_from_ray,
)
from mcore_rl.runtime.session import loopback_session
from mcore_rl.runtime.stops import STOPS

# One OpenMP thread per process unless the run assigns more (`cores`). OpenMP threads spin while they wait for each
# other: with more of them than cores, a step took up to 100 times as long.
PROCESS_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Let malloc keep the memory of a step's activations. Page faults on returned memory would take more time than the
    # passes that fill it.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 28),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 29),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # No record of every call for `ray list tasks`, which the run does not use: it takes about a tenth of the time of
    # calls in the driver, the engines and the ranks, and time of Ray's control service.
    "RAY_task_events_report_interval_ms": "0",
}
ON_CPU = {
    # Dynamo would start a C++ compiler at the first call. On GPUs, vLLM's graphs and Megatron's fusions need it.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ON_GPUS = {
    # Kernels start in the order of their launches; the overlap of tensor and sequence parallelism relies on it.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
ATTEMPTS_TO_START = 3
"""Ray (2.60) gives its daemons 30 seconds to start, which is too short on a very busy host."""
SECONDS_TO_RESERVE = 60.0
"""Time limit for the reservation of nodes."""


def process_environment(*, on_gpus: bool) -> dict[str, str]:
    """Return the default environment variables of the processes of a run; the user's values take precedence."""
    return PROCESS_ENVIRONMENT | (ON_GPUS if on_gpus else ON_CPU)


@contextlib.contextmanager
def ray_cluster(
    cluster: ClusterConfig, bundle: Mapping[str, float]
) -> Iterator[list[PlacementGroupSchedulingStrategy]]:
    """Join the Ray cluster at cluster.address, or start one on this host for the block. `bundle` has the resources that
    the run needs on each node. Yields, per node, the scheduling strategy that places a process there.

    A cluster started here ends with the block, and also if this process is killed (by PR_SET_PDEATHSIG). It accepts
    only connections from this host with its own token (session.loopback_session).

    Raises: ConfigError when the cluster does not have the nodes.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Errors of abandoned calls come from processes whose failure the run has already reported.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    for name, value in process_environment(on_gpus=cluster.uses_cuda).items():
        os.environ.setdefault(name, value)  # processes of a local cluster inherit it, without a runtime-env agent
    session, guard = contextlib.ExitStack(), Guard(STOPS.give_up)
    try:
        with signals_kept_from_ray():
            _connect(cluster, bundle, session)
        guard.watch(Daemons.started())
        with _reserved(cluster, bundle) as nodes:
            yield nodes
    finally:
        # The daemons end on purpose from here on. The guard stays, because `ray.shutdown` hangs if one died before.
        guard.let_end()
        with daemons_killed_at_once():
            ray.shutdown()
        guard.stop()
        session.close()


def _connect(cluster: ClusterConfig, bundle: Mapping[str, float], session: contextlib.ExitStack) -> None:
    if cluster.address is None:
        _start_local(cluster, int(bundle["CPU"]) + 1, session.enter_context(loopback_session()))
        return
    try:
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={
                "env_vars": {name: os.environ[name] for name in process_environment(on_gpus=cluster.uses_cuda)}
            },
        )
    except ConnectionError as error:
        raise ConfigError(
            f"cluster.address={cluster.address}: no Ray cluster answers there ({str(error).splitlines()[0]})"
        ) from None


def _start_local(cluster: ClusterConfig, num_cpus: int, directory: Path) -> None:
    # If this process is killed, Ray's agents try to report it to the control service (GCS), which is dead too. They
    # exit after this time in seconds; by default after a minute.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "15")
    for attempt in range(ATTEMPTS_TO_START):
        try:
            with services_kept_from_ray():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    object_store_memory=int(cluster.object_store_gib * 2**30),
                    log_to_driver=False,
                    logging_level="ERROR",
                    _temp_dir=str(directory),
                )
            return
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt == ATTEMPTS_TO_START - 1:
                raise
            ray.shutdown()


@contextlib.contextmanager
def _reserved(cluster: ClusterConfig, bundle: Mapping[str, float]) -> Iterator[list[PlacementGroupSchedulingStrategy]]:
    """Reserve the bundle on all nodes at once, or on none."""
    # STRICT_SPREAD places every bundle on a node of its own.
    group = placement_group([dict(bundle)] * cluster.nodes, strategy="STRICT_SPREAD")
    try:
        if not group.wait(SECONDS_TO_RESERVE):
            raise ConfigError(
                f"cluster.nodes={cluster.nodes}: the run needs as many nodes with {_text(bundle)} free; the "
                f"Ray cluster at {cluster.address or 'this machine'} did not have them within "
                f"{SECONDS_TO_RESERVE:.0f} s. Its nodes: {_offers(bundle)}"
            )
        yield [PlacementGroupSchedulingStrategy(group, index) for index in _in_order(group)]
    finally:
        if cluster.address is not None:  # a local cluster ends as a whole, and may be gone already
            remove_placement_group(group)


def _in_order(group: PlacementGroup) -> list[int]:
    """Return the bundle indices: the driver's node first, then by node name. A restart thus uses the same order."""
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    driver = ray.get_runtime_context().get_node_id()
    node_of: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return sorted(node_of, key=lambda index: (node_of[index] != driver, natural(names[node_of[index]]), node_of[index]))


def _offers(bundle: Mapping[str, float]) -> str:
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: natural(node["NodeName"]))
    return "; ".join(
        f"{node['NodeName']} with {_text({kind: node['Resources'].get(kind, 0) for kind in bundle})}" for node in alive
    )


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def natural(name: str) -> list[tuple[int, str]]:
    """Return the sort key of a node's name: n2 comes before n10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
