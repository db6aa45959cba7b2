"""SGLang 0.5.23 on CPUs (runs in SGLang's environment)."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from mcore_rl.engines.sglang.devices.memory import CpuMemory, SleepMemory
from mcore_rl.engines.sglang.settings import RankSettings

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs

    from mcore_rl.engines.rank_memory import RankMemory


class Cpu:
    """Device of the ranks of an engine on CPUs."""

    torch_device = torch.device("cpu")

    def __init__(self, settings: RankSettings) -> None:
        self.gpu_id = settings.rank  # selects the rank's cores
        self._cache_bytes = settings.kv_cache_bytes

    def import_sglang(self) -> None:
        from mcore_rl.engines.sglang.devices import cpu_patches

        cpu_patches.prepare()
        import sglang.srt.managers.scheduler  # noqa: F401  (the modules that `patch` changes)

        cpu_patches.patch()

    def complete(self, arguments: ServerArgs) -> None:
        arguments.max_total_tokens = _cache_tokens(arguments, self._cache_bytes)
        if arguments.attn_dp_size > 1:
            # Otherwise SGLang divides shared experts among the ranks, because there is no DeepEP.
            os.environ["SGLANG_SHARED_EXPERT_TP1"] = "1"

    def adapt(self, scheduler: Scheduler) -> None:
        # On CPU there is no stream to synchronize, and a batch is complete when its launch returns.
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

    # Of a model with a vision tower, only the text model has a KV cache.
    config = AutoConfig.from_pretrained(arguments.model_path).get_text_config()
    size = torch.finfo(getattr(torch, arguments.dtype)).bits // 8
    if getattr(config, "kv_lora_rank", None):  # every rank keeps the latents of all heads
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        heads = config.num_key_value_heads * arguments.attn_dp_size // arguments.tp_size
        width = 2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return int(num_bytes // (width * config.num_hidden_layers * size))
