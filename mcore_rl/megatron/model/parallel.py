"""Process groups: torch.distributed, megatron.core's parallel state, and the random number streams."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from mcore_rl.errors import ConfigError, McoreRLError
from mcore_rl.megatron import cpu
from model_converters.mapping.layout import TrainLayout

cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402


def initialize(
    layout: TrainLayout,
    *,
    rank: int,
    init_method: str,
    device: str,
    timeout_seconds: int,
    seed: int,
) -> None:
    """Joins the process group (gloo on "cpu", NCCL on "cuda") and seeds the random streams of this rank.

    `init_method` is tcp://host:port, the same on all ranks; rank 0 listens there. On CUDA the process must see its own
    GPU as device 0 or have called torch.cuda.set_device.

    Collective: all ranks of the layout.
    Raises: ConfigError when `device` is not what this process has.
    """
    present = "cuda" if torch.cuda.is_available() else "cpu"
    if device != present:
        raise ConfigError(
            f"cluster.device={device}, but this process has {present}"
            + (": set cluster.device=cpu" if device == "cuda" else ": start it with CUDA_VISIBLE_DEVICES= empty")
        )
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        **_meeting_point(init_method, rank, layout.world_size, timeout),
        rank=rank,
        world_size=layout.world_size,
        timeout=timeout,
    )
    initialize_groups(layout, timeout_seconds=timeout_seconds, seed=seed)


def _meeting_point(init_method: str, rank: int, world_size: int, timeout: timedelta) -> dict[str, Any]:
    """Arguments of init_process_group. For tcp:// a store that listens on that very address: torch's own (2.13) would
    listen on every network of the host, and it takes orders from whoever connects."""
    address = urlsplit(init_method)
    if address.scheme != "tcp" or address.hostname is None or address.port is None:
        return {"init_method": init_method}
    options: dict[str, Any] = {"timeout": timeout, "is_master": rank == 0}
    if rank == 0:
        options["master_listen_fd"] = _listen(address.hostname, address.port).detach()
    return {"store": dist.TCPStore(address.hostname, address.port, world_size, **options)}


def _listen(host: str, port: int) -> socket.socket:
    """Raises: ConfigError when another process has the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"{socket.gethostname()}: another process has taken port {port}, where ranks were to meet; start again: "
            "the port is another one each time"
        ) from None


def initialize_groups(layout: TrainLayout, *, timeout_seconds: int, seed: int, gloo_groups: bool = True) -> None:
    """Builds megatron's groups in the process group that exists, replacing earlier ones, and seeds.

    `gloo_groups`: also make the CPU groups that the distributed optimizer saves through (a fake process group
    cannot make them).

    Collective: all ranks of the layout.
    """
    if dist.get_world_size() != layout.world_size:
        raise McoreRLError(f"a layout of {layout.world_size} ranks in a process group of {dist.get_world_size()}")
    if parallel_state.model_parallel_is_initialized():
        _leave_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=max(1, -(-timeout_seconds // 60)),
        create_gloo_process_groups=gloo_groups,
    )
    seed_streams(seed)


def seed_streams(seed: int) -> None:
    """Seeds the random streams of this rank anew, by its place in the layout."""
    # Pipeline stages draw different weights; inside, tensor- and expert-parallel ranks get streams of their own.
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)


def _leave_groups() -> None:
    """Ends megatron's groups; destroy_model_parallel (0.16.1) only forgets them, and every gloo group keeps threads."""
    dist.barrier()  # a peer may still be in the last collective of one
    for group in parallel_state._global_process_group_list or []:
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def destroy() -> None:
    """Leaves all groups. Safe to call twice, and when initialisation failed half-way; call it in a finally."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
