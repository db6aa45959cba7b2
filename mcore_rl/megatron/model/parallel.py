"""Set-up of process groups: torch.distributed, megatron.core's parallel state, and random number streams."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mcore_rl.errors import ConfigError, McoreRLError
from model_converters.mapping.layout import TrainLayout


def initialize(layout: TrainLayout, *, rank: int, init_method: str | None, timeout_seconds: int, seed: int) -> None:
    """Make this process a rank of `layout`: join the process group (NCCL with CUDA, otherwise gloo), create Megatron's
    groups, and seed the random streams.

    init_method: tcp://host:port, the same on all ranks; rank 0 listens on it. None: the process has joined already.
    With CUDA, the process's GPU must be device 0, or torch.cuda.set_device must have been called.

    Collective: all ranks of the layout.
    """
    if init_method is not None:
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            **_rendezvous(init_method, rank, layout.world_size, timeout),
            rank=rank,
            world_size=layout.world_size,
            timeout=timeout,
        )
    initialize_groups(layout, timeout_seconds=timeout_seconds, seed=seed)


def _rendezvous(init_method: str, rank: int, world_size: int, timeout: timedelta) -> dict[str, object]:
    """Return the arguments of init_process_group. For tcp://, a store that listens only on the given address: torch's
    own store (2.13) would listen on every network interface, and it executes requests without authentication."""
    address = urlsplit(init_method)
    if address.scheme != "tcp" or address.hostname is None or address.port is None:
        return {"init_method": init_method}
    options: dict[str, object] = {"timeout": timeout, "is_master": rank == 0}
    if rank == 0:
        # The store owns the socket from now on.
        options["master_listen_fd"] = _listen(address.hostname, address.port).detach()
    return {"store": dist.TCPStore(address.hostname, address.port, world_size, **options)}


def _listen(host: str, port: int) -> socket.socket:
    """Open the listening socket of the store. Raises: ConfigError if the port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"{socket.gethostname()}: port {port} for the rendezvous of ranks is used by another process; start again, "
            "each start uses a different port"
        ) from None


def initialize_groups(layout: TrainLayout, *, timeout_seconds: int, seed: int, gloo_groups: bool = True) -> None:
    """Create Megatron's groups in the existing process group, replacing earlier ones, and seed the random streams.

    gloo_groups: also create the CPU groups through which the distributed optimizer saves (impossible in a fake process
    group).

    Collective: all ranks of the layout.
    """
    if dist.get_world_size() != layout.world_size:
        raise McoreRLError(
            f"the layout has {layout.world_size} ranks, but the process group has {dist.get_world_size()}"
        )
    if parallel_state.model_parallel_is_initialized():
        _destroy_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        # Megatron's unit is minutes: round up, to at least one.
        distributed_timeout_minutes=max(1, -(-timeout_seconds // 60)),
        create_gloo_process_groups=gloo_groups,
    )
    seed_streams(seed)


def seed_streams(seed: int) -> None:
    """Seed the random streams of this rank according to its position in the layout."""
    # Each pipeline stage has its own seed. Megatron derives separate streams for tensor- and expert-parallel ranks.
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)


def _destroy_groups() -> None:
    """Destroy Megatron's groups. destroy_model_parallel (0.16.1) only drops its references, and the threads of gloo
    groups would remain."""
    dist.barrier()  # a peer may still be in the last collective of a group
    for group in parallel_state._global_process_group_list or []:
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def destroy() -> None:
    """Leave all groups. Safe to call twice and after a failed initialization; call it in a finally block."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
