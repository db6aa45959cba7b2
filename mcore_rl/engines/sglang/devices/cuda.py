"""SGLang 0.5.23 on a GPU (runs in SGLang's environment). Environment variables of the rank: environment.py."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from mcore_rl.engines.sglang.devices.memory import SleepMemory, TaggedMemory, kv_caches
from mcore_rl.engines.sglang.settings import GpuMemory, RankSettings

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs

    from mcore_rl.engines.rank_memory import RankMemory

DEEPEP_TOKENS = 128
"""SGLang's default limit of the tokens that a rank sends in a decoding pass."""


class Gpu:
    """GPU of a rank, numbered like the rank on its host. All GPUs of the engine are visible to each rank, because ranks
    open the memory of each other."""

    def __init__(self, settings: RankSettings) -> None:
        self.gpu_id = settings.local_rank
        self.torch_device = torch.device("cuda", self.gpu_id)

    def measure(self) -> GpuMemory:
        """Create the CUDA context of this process and return the memory of its GPU.

        Raises: RuntimeError if there is no such GPU.
        """
        if not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} of SGLang's environment finds no GPU")
        if self.gpu_id >= torch.cuda.device_count():
            raise RuntimeError(f"rank needs GPU {self.gpu_id}, but only {torch.cuda.device_count()} GPUs are visible")
        torch.cuda.set_device(self.gpu_id)
        torch.zeros(1, device=self.torch_device)
        return GpuMemory(*torch.cuda.mem_get_info())

    def import_sglang(self) -> None:
        import sglang.srt.managers.scheduler  # noqa: F401

    def complete(self, arguments: ServerArgs) -> None:
        # mem_fraction_static determines the size of the KV cache. DeepEP's buffers must hold a token of every request.
        requests = -(-arguments.max_running_requests // arguments.attn_dp_size)
        if arguments.attn_dp_size > 1 and requests > DEEPEP_TOKENS:
            os.environ.setdefault("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", str(requests))

    def adapt(self, scheduler: Scheduler) -> None:
        """Prepare the streams of the overlap schedule, as Scheduler.run_event_loop does."""
        if not scheduler.enable_overlap:
            return
        # torch takes streams in turn from a pool. Batches do not overlap in the stream that prepares them.
        while scheduler.schedule_stream.cuda_stream == scheduler.forward_stream.cuda_stream:
            scheduler.schedule_stream = torch.cuda.Stream(priority=0)
        scheduler._war_barrier_enabled = True

    def settle(self) -> None:
        torch.cuda.synchronize()

    def stream(self, scheduler: Scheduler) -> AbstractContextManager[object]:
        # SGLang's event loop runs in this stream. Work in the default stream, such as copies of weights, would not be
        # ordered with its kernels.
        return torch.cuda.stream(scheduler.schedule_stream)

    def memory(self, scheduler: Scheduler, rank: RankMemory) -> SleepMemory:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

        updater = scheduler.weight_updater
        return TaggedMemory(
            pause=lambda tags: updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags)),
            resume=lambda tags: updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags)),
            model=scheduler.tp_worker.model_runner.model,
            cleared=[*kv_caches(scheduler), scheduler.req_to_token_pool.req_to_token],
            settle=_settle,
        )


def _settle() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
