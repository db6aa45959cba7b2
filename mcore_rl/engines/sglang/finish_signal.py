"""Agreement of the ranks of attention data parallelism on the end of a call (runs in SGLang's environment)."""

from __future__ import annotations

import torch
from sglang.srt.managers.scheduler_components import dp_attn


class FinishSignal:
    """Flag that a request has finished on any rank.

    Before each batch, SGLang 0.5.23's schedulers exchange one row of numbers per rank (MLPSyncBatchInfo.all_gather).
    The flag is one of these numbers, so it costs no collective of its own, and all ranks see it at the same batch: the
    one after the request finished. The number is SGLang's health check flag, which it uses for metrics only.
    """

    def __init__(self) -> None:
        self._raised = self._seen = False

    def reset(self) -> None:
        """Lower the flag. Collective: all ranks, between two batches."""
        self._raised = self._seen = False

    def everywhere(self, finished: bool) -> bool:
        """Return whether a request had finished on any rank before this batch was scheduled; the same on all ranks.

        finished: whether a request of this rank finished in this batch. The ranks learn it with the next one.
        """
        self._raised |= finished
        return self._seen

    def install(self) -> None:
        """Add the flag to the numbers that SGLang's schedulers exchange."""
        signal = self

        class SignallingInfo(dp_attn.MLPSyncBatchInfo):
            def all_gather(
                self, device: torch.device | str, group: torch.distributed.ProcessGroup, use_all_reduce: bool = False
            ) -> None:
                self.is_health_check = signal._raised
                super().all_gather(device, group, use_all_reduce)
                signal._seen = self.any_health_check

        dp_attn.MLPSyncBatchInfo = SignallingInfo
