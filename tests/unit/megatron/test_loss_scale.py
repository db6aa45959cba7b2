"""Loss scale of float16 training: its range."""

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
