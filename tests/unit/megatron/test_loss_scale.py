"""Loss scale of float16 training: its range, and states of runs with other settings."""

from __future__ import annotations

from mcore_rl.config.models import LARGEST_SCALE, LossScaleConfig
from mcore_rl.megatron.optim.loss_scale import LossScaler


def test_loss_scale_grows_up_to_the_largest_and_falls_again() -> None:
    settings = LossScaleConfig(initial=LARGEST_SCALE / 4, window=1, hysteresis=1)
    scaler = LossScaler(settings, "actor.optimizer.loss_scale")
    scales = []
    for overflows in (False, False, False, False, True):
        scaler.update(overflows)
        scaler.finish_update()
        scales.append(scaler.value / LARGEST_SCALE)
    assert scales == [0.5, 1, 1, 1, 0.5]


def test_loaded_loss_scale_respects_the_present_settings() -> None:
    """A number of updates above a window that was lowered would never let the scale grow again."""
    scaler = LossScaler(LossScaleConfig(initial=64, minimum=16, window=3, hysteresis=2), "actor.optimizer.loss_scale")
    scaler.load({"scale": float("inf"), "growth_tracker": 900, "hysteresis_tracker": 9})
    assert scaler.state() == {"scale": LARGEST_SCALE, "growth_tracker": 2, "hysteresis_tracker": 2}
    scaler.load({"scale": 4.0, "growth_tracker": 900, "hysteresis_tracker": 1})
    assert (scaler.value, scaler.is_exhausted) == (16, True)
    scaler.update(False)
    scaler.finish_update()
    assert scaler.value == 32
