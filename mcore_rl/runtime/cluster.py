"""Starts or joins a Ray cluster, reserves its nodes, and guarantees that nothing is left running."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mcore_rl.config.rules.defaults import uses_cuda
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.runtime.daemons import Daemons, Guard, services_kept_from_ray, signals_kept_from_ray
from mcore_rl.runtime.session import loopback_session
from mcore_rl.runtime.stops import STOPS

# One OpenMP thread per process, but where the run gives a process more (`cores`): more threads than cores, all of which
# wait for each other, once cost 100 times the work.
PROCESS_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # A step's activations stay with the process: faulting them in anew costs more than the passes that fill them.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 28),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 29),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
ON_CPU = {
    # It would start a C++ compiler at the first call. On GPUs vLLM's graphs and megatron's fusions are made with it.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ON_GPUS = {
    # Kernels start in the order in which they are called: tensor and sequence parallelism overlap on that.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
ATTEMPTS_TO_START = 3
"""Ray (2.60) gives its own processes 30 seconds to come up, which are too few on a host that is very busy."""
SECONDS_TO_RESERVE = 60.0
"""How long a cluster's nodes may take to be free; one that was joined has them already."""


def process_environment(*, on_gpus: bool) -> dict[str, str]:
    """Variables that the processes of a run have unless the user's shell says otherwise."""
    return PROCESS_ENVIRONMENT | (ON_GPUS if on_gpus else ON_CPU)


@contextlib.contextmanager
def ray_cluster(config: Config, bundle: Mapping[str, float]) -> Iterator[list[Any]]:
    """A Ray cluster for the length of the block: joined at cluster.address, else started on this machine. `bundle` is
    what the run needs of each node; yields, per node, the scheduling strategy that puts a process there.

    A cluster started here ends with the block, and also when this process is killed (the kernel tells them).
    Only this machine reaches it, with a token of its own (session.loopback_session).

    Raises: ConfigError when the cluster does not have the nodes.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Errors of calls that nobody waits for any more are those of processes of which the run has told already.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    for name, value in process_environment(on_gpus=uses_cuda(config.cluster)).items():
        os.environ.setdefault(name, value)  # a local cluster's processes inherit it; no runtime-env agent needed
    session, guard = contextlib.ExitStack(), Guard(STOPS.give_up)
    try:
        with signals_kept_from_ray():
            _connect(config, bundle, session)
        guard.watch(Daemons.started())
        with _reserved(config, bundle) as nodes:
            yield nodes
    finally:
        guard.let_end()
        ray.shutdown()
        guard.stop()
        session.close()


def _connect(config: Config, bundle: Mapping[str, float], session: contextlib.ExitStack) -> None:
    if config.cluster.address is None:
        _start_local(config, int(bundle["CPU"]) + 1, session.enter_context(loopback_session()))
        return
    try:
        ray.init(
            address=config.cluster.address,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={
                "env_vars": {name: os.environ[name] for name in process_environment(on_gpus=uses_cuda(config.cluster))}
            },
        )
    except ConnectionError as error:
        raise ConfigError(
            f"cluster.address={config.cluster.address}: no Ray cluster answers there ({str(error).splitlines()[0]})"
        ) from None


def _start_local(config: Config, num_cpus: int, directory: Path) -> None:
    for attempt in range(ATTEMPTS_TO_START):
        try:
            with services_kept_from_ray():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    object_store_memory=int(config.cluster.object_store_gib * 2**30),
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
def _reserved(config: Config, bundle: Mapping[str, float]) -> Iterator[list[Any]]:
    """The bundle on every node, all at once or not at all."""
    group = placement_group([dict(bundle)] * config.cluster.nodes, strategy="STRICT_SPREAD")
    try:
        if not group.wait(SECONDS_TO_RESERVE):
            raise ConfigError(
                f"cluster.nodes={config.cluster.nodes}: the run needs as many nodes with {_words(bundle)} free; the "
                f"Ray cluster at {config.cluster.address or 'this machine'} did not have them within "
                f"{SECONDS_TO_RESERVE:.0f} s. Its nodes: {_offers(bundle)}"
            )
        yield [PlacementGroupSchedulingStrategy(group, index) for index in _in_order(group)]
    finally:
        if config.cluster.address is not None:  # one of our own goes with all that is in it, and may be gone already
            remove_placement_group(group)


def _in_order(group: Any) -> list[int]:
    """Bundle indices, the driver's node first, then by name: a restarted run finds its ranks where they were."""
    names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    driver = ray.get_runtime_context().get_node_id()
    node_of: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return sorted(node_of, key=lambda index: (node_of[index] != driver, natural(names[node_of[index]]), node_of[index]))


def _offers(bundle: Mapping[str, float]) -> str:
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: natural(node["NodeName"]))
    return "; ".join(
        f"{node['NodeName']} with {_words({kind: node['Resources'].get(kind, 0) for kind in bundle})}" for node in alive
    )


def _words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def natural(name: str) -> list[tuple[int, str]]:
    """Key of a node's name by which n2 comes before n10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
