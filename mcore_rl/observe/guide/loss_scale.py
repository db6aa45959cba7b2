"""Entries about the loss scale of a float16 model: actor and critic have a scale each."""

from __future__ import annotations

from collections.abc import Callable

from mcore_rl.config.models import LossScaleConfig
from mcore_rl.config.schema import Config
from mcore_rl.observe.guide.conditions import WINDOW, Repeated
from mcore_rl.observe.guide.entries import MetricEntry, Remedy, Warned


def loss_scale_entries(role: str, settings_of: Callable[[Config], LossScaleConfig]) -> tuple[MetricEntry, MetricEntry]:
    """Return the entries of a trained model. role: section of its keys and prefix of its metrics. settings_of: its
    part of a configuration."""
    key = f"{role}.optimizer.loss_scale"

    def starts_high(config: Config) -> bool:
        return settings_of(config).initial > 2.0**16

    skipped = MetricEntry(
        f"{role}/skipped_updates",
        "0 after the first steps; only with model.dtype=float16",
        (
            Remedy(
                f"lower {key}.initial, for example to 65536, if only the first updates are skipped",
                starts_high,
                "if it is higher",
            ),
            Remedy("set model.dtype=bfloat16 if updates are skipped again and again"),
        ),
        Warned(
            # A scale that has doubled once too often costs loss_scale.hysteresis updates, by default 2.
            Repeated(0, steps=5),
            f"updates of the {role} were skipped in 5 steps in a row ({{now:.0f}} in this one), because gradients "
            "overflow: {remedies}",
            after_step=WINDOW,
        ),
        f"above 0 in many steps while {role}/loss_scale falls: gradients grow without limit",
    )
    scale = MetricEntry(
        f"{role}/loss_scale",
        "constant, or doubling from time to time; only with model.dtype=float16",
        (Remedy(f"look at {role}/grad_norm and at the rollouts of the steps before"),),
        signs=f"falls towards {key}.minimum: an overflow at the minimum ends the run",
    )
    return skipped, scale
