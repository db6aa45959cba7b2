"""Parallel layout of an inference engine: rank coordinates and the layers of each pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from model_converters.errors import LayoutError


@dataclass(frozen=True)
class EngineLayout:
    """Sizes of an engine's parallel axes in the rank order of vLLM and SGLang: rank = tp + TP * (pp + PP * dp).

    dp is attention data parallelism: its ranks hold the same attention weights. The experts are divided among all
    ranks of a stage: whole experts with `expert_parallel`, otherwise slices of every expert. With `draft_layers` the
    engine drafts with the model's multi-token-prediction layers; otherwise it does not load them.

    Source: vllm.distributed.parallel_state, FusedMoEParallelConfig (0.32); sglang.srt.runtime_context (0.5.23).
    Raises: LayoutError.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    expert_parallel: bool = False
    draft_layers: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "pp"):
            if getattr(self, name) < 1:
                raise LayoutError(f"the engine's {name} is {getattr(self, name)}; it must be at least 1")
        if self.expert_parallel and self.tp > 1 and self.dp > 1:
            # vLLM then divides the tokens among the tp ranks and keeps shared experts whole on each of them.
            raise LayoutError("an engine with expert_parallel and attention data parallelism must have tp=1")

    @classmethod
    def of_ranks(
        cls, num_ranks: int, *, expert_parallel: bool, data_parallel_attention: bool, draft_layers: bool = False
    ) -> EngineLayout:
        """Return the layout of an engine of `num_ranks` ranks without pipeline stages, as its settings describe it.

        Raises: LayoutError.
        """
        tp, dp = (1, num_ranks) if data_parallel_attention else (num_ranks, 1)
        return cls(tp, dp, expert_parallel=expert_parallel, draft_layers=draft_layers)

    @property
    def num_ranks(self) -> int:
        """Ranks of one engine."""
        return self.tp * self.pp * self.dp

    @property
    def expert_ranks(self) -> int:
        """Ranks of one stage, among which the experts are divided."""
        return self.tp * self.dp

    def rank(self, tp: int, pp: int, dp: int) -> int:
        """Return the rank at these coordinates."""
        return tp + self.tp * (pp + self.pp * dp)

    def stage_layers(self, num_layers: int) -> list[range]:
        """Return the layers of every stage. The remainder goes to the stages before the last, one layer each.

        Source: vllm.distributed.utils.get_pp_indices (0.32), without VLLM_PP_LAYER_PARTITION.
        Raises: LayoutError for a stage without layers.
        """
        if self.pp > num_layers:
            raise LayoutError(f"{num_layers} layers are fewer than the engine's pp {self.pp}")
        each, rest = divmod(num_layers, self.pp)
        counts = [each] * self.pp
        for stage in range(self.pp - 1 - rest, self.pp - 1):
            counts[stage] += 1
        starts = [sum(counts[:stage]) for stage in range(self.pp + 1)]
        return [range(first, end) for first, end in pairwise(starts)]
