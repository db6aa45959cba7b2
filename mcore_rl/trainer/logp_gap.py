"""Comparison of the engines' log-probabilities with the trainer's, before the first step of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mcore_rl.config.quantization import FP8, INT4, UNQUANTIZED
from mcore_rl.config.rules.models import uses_lora
from mcore_rl.config.schema import Config
from mcore_rl.data.batching import UpdateSchedule, build_batch, gather
from mcore_rl.data.packing import TOKENS, SequenceCost
from mcore_rl.errors import ConfigError
from mcore_rl.ports import Actor
from mcore_rl.types import LogpGap, RolloutResult

KEY, AUTO = "rollout.max_logp_gap", "auto"
BY_DTYPE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}
"""Limit of the mean absolute difference in nats, by the engine's dtype (model.dtype)."""
BY_ROUNDING = {FP8: 0.2, INT4: 0.5}
"""Limit in nats if engine or trainer rounds weights, by format: FP8 has a 3-bit mantissa, INT4 15 values per group."""
NUM_PROMPTS = 4
"""Prompts per engine. If the trainer has more data-parallel ranks, the number is raised, since each needs one prompt.
"""


def logp_gap_limit(config: Config) -> float | None:
    """Return the limit set by rollout.max_logp_gap; None: no comparison."""
    limit = config.rollout.max_logp_gap
    if limit != AUTO:
        return None if limit is None else float(limit)
    quantization = config.rollout.quantization if config.actor.fp8 == "none" else FP8
    # With quantisation-aware training both sides round alike.
    if quantization == UNQUANTIZED or config.actor.quantization_aware:
        return BY_DTYPE[config.model.dtype]
    return BY_ROUNDING[quantization]


@dataclass(frozen=True)
class LogpGapCheck:
    """Compares log-probabilities of a few short responses from every engine. The tokens stay on engines and ranks.

    `probe` generates one response to each of a number of training prompts on every engine, outside of training, and
    returns {engine name: result} with unique group ids. `show` prints a line of the start-up log.
    """

    config: Config
    actor: Actor
    probe: Callable[[int], dict[str, RolloutResult]]
    num_dp_ranks: int
    show: Callable[[str], None]
    cost: SequenceCost = TOKENS

    def check(self, version: int) -> None:
        """Compare; the engines must hold the actor's weights of `version`.

        Raises: ConfigError naming the engine with the largest difference, its size, and probable causes.
        """
        limit = logp_gap_limit(self.config)
        if limit is None:
            return
        gaps = self._gaps(version)
        # NaN counts as the largest difference.
        worst = max(gaps, key=lambda name: (math.isnan(gaps[name].typical), gaps[name].typical))
        found = _summary(gaps[worst])
        if not gaps[worst].typical <= limit:  # also true for NaN
            causes = "; ".join(probable_causes(self.config, gaps[worst]))
            raise ConfigError(
                f"log-probabilities of {worst} and the trainer differ by {found}, and {KEY} is {limit:g}: training "
                f"has not started. Probable causes: {causes}. {KEY}=null skips this check"
            )
        engines = worst if len(gaps) == 1 else f"{len(gaps)} rollout engines"
        self.show(f"log-probabilities of {engines} and trainer differ by {found}; the limit is {limit:g}")

    def _gaps(self, version: int) -> dict[str, LogpGap]:
        """Return the gap of each engine by its name."""
        # Every data-parallel rank needs at least one response of every engine, since an update covers all ranks.
        num_prompts = max(NUM_PROMPTS, self.num_dp_ranks)
        results = self.probe(num_prompts)
        # One update per engine.
        schedule = UpdateSchedule(num_prompts, num_dp_ranks=self.num_dp_ranks, cost=self.cost)
        kept = gather([scalars for _, scalars in results.values()])
        batch = build_batch([chunk for chunk, _ in results.values()], kept, schedule=schedule, version=version)
        return dict(zip(results, self.actor.compare_logp(batch), strict=True))


def probable_causes(config: Config, gap: LogpGap) -> list[str]:
    """List possible reasons for a difference under this configuration, the most frequent first."""
    rollout, model, causes = config.rollout, config.model, []
    rounds = model.dtype != "float32"
    causes.append(
        f"a field of {model.hf_path}/config.json that {rollout.engine} and the trainer interpret differently "
        "(sliding_window, rope_scaling, logit_scale and the like)"
    )
    causes.append(f"rounding: model.dtype={model.dtype}, or a quantised model.hf_path")
    if rounds and not model.float32_head:
        causes.append(
            "rounding of the engine's logits: model.float32_head=true keeps them in float32, as in the trainer"
        )
    if config.actor.fp8 != "none":
        causes.append(f"rounding of actor.fp8={config.actor.fp8}")
    if rollout.quantization != UNQUANTIZED and not config.actor.quantization_aware:
        causes.append(f"rounding of the engine's weights, rollout.quantization={rollout.quantization}")
    causes.append(f"a different attention in the engine (backend of {rollout.engine}, quantised KV cache)")
    if uses_lora(config.actor):
        causes.append("rounding of the adapters, which the engine holds merged into the weights")
    if gap.own_routing:
        causes.append("different routing in the engine: actor.moe.router_replay=engine replays it in the trainer")
        if rounds and not model.float32_router:
            causes.append("rounding in the engine's routers: model.float32_router=true keeps their logits in float32")
    if not config.weights.verify_every:
        causes.append("different weights in the engine: weights.verify_every=1 compares them after every sync")
    return causes


def _summary(gap: LogpGap) -> str:
    rest = f"largest {gap.largest.value:.3g}, {gap.num_tokens} tokens"
    if gap.own_routing:
        return f"{gap.typical:.3g} nats in the median (mean {gap.mean.value:.3g}, {rest})"
    return f"{gap.mean.value:.3g} nats on average ({rest})"
