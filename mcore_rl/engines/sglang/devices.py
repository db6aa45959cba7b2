"""Parts of a rank that depend on its device (runs in SGLang's environment). On GPUs: cuda.py."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from mcore_rl.engines.sglang.memory import CpuMemory, SleepMemory
from mcore_rl.engines.sglang.settings import RankSettings

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs

    from mcore_rl.engines.rank_memory import RankMemory


class Device(Protocol):
    """A rank's device.

    gpu_id: SGLang's number of the device.
    torch_device: device of the rank's parameters.
    """

    gpu_id: int
    torch_device: torch.device

    def import_sglang(self) -> None:
        """Import SGLang's scheduler, before any other module of SGLang is imported."""

    def complete(self, arguments: ServerArgs) -> None:
        """Set the server arguments that depend on the model."""

    def adapt(self, scheduler: Scheduler) -> None:
        """Change a new scheduler, whose event loop is never run."""

    def settle(self) -> None:
        """Wait until the device has finished the work of the start, which used another stream than later calls."""

    def stream(self, scheduler: Scheduler) -> AbstractContextManager[object]:
        """Return a context for all calls of a rank after its start: the device runs their work in order."""

    def memory(self, scheduler: Scheduler, rank: RankMemory) -> SleepMemory:
        """Return the memory that the rank releases during sleep."""


class Cpu:
    """Device of the ranks of an engine on CPUs."""

    torch_device = torch.device("cpu")

    def __init__(self, settings: RankSettings) -> None:
        self.gpu_id = settings.rank  # selects the rank's cores
        self._cache_bytes = settings.kv_cache_bytes

    def import_sglang(self) -> None:
        from mcore_rl.engines.sglang import cpu

        cpu.prepare()
        import sglang.srt.managers.scheduler  # noqa: F401  (the modules that `patch` changes)

        cpu.patch()

    def complete(self, arguments: ServerArgs) -> None:
        arguments.max_total_tokens = _cache_tokens(arguments, self._cache_bytes)

    def adapt(self, scheduler: Scheduler) -> None:
        # On CPU there is no stream to synchronize, and no overlapping batch that the barrier would protect.
        scheduler.schedule_stream.synchronize = lambda: None
        scheduler._war_barrier_enabled = False

    def settle(self) -> None:
        """Do nothing."""

    def stream(self, scheduler: Scheduler) -> AbstractContextManager[object]:
        return nullcontext()

    def memory(self, scheduler: Scheduler, rank: RankMemory) -> SleepMemory:
        return CpuMemory(rank)


def _cache_tokens(arguments: ServerArgs, num_bytes: int) -> int:
    """Return the number of tokens that fit in the KV cache."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(arguments.model_path)
    size = torch.finfo(getattr(torch, arguments.dtype)).bits // 8
    if getattr(config, "kv_lora_rank", None):  # every rank keeps the latents of all heads
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        heads = config.num_key_value_heads // arguments.tp_size
        width = 2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return int(num_bytes // (width * config.num_hidden_layers * size))
