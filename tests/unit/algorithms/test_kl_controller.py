"""The adaptive controller compared with calculations by hand, arXiv 1909.08593, section 2.2."""

from __future__ import annotations

import pytest

from mcore_rl.algorithms.kl_controller import KLController
from mcore_rl.config.algorithm import KLConfig
from mcore_rl.errors import NonFiniteError

ADAPTIVE = KLConfig(in_reward=0.5, controller="adaptive", target=0.04, horizon=640)


def built(config: KLConfig = ADAPTIVE) -> KLController:
    controller = KLController.from_config(config)
    assert controller is not None
    return controller


@pytest.mark.parametrize(
    ("kl", "responses", "expected"),
    [
        (0.04, 64, 0.5),
        (0.044, 64, 0.5 * 1.01),  # error 0.1, a tenth of the horizon
        (0.036, 64, 0.5 * 0.99),
        (4.0, 64, 0.5 * 1.02),  # the error is clipped at 0.2
        (-3.0, 64, 0.5 * 0.98),
        (4.0, 320, 0.5 * 1.1),
    ],
)
def test_kl_controller_step_matches_calculation_by_hand(kl: float, responses: int, expected: float) -> None:
    controller = built()
    controller.update(kl, responses)
    assert controller.coefficient == pytest.approx(expected, rel=1e-12)


def test_kl_controller_multiplies_steps_and_resumes() -> None:
    first, second = built(), built()
    first.update(1.0, 64)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(1.0, 64)
        assert controller.coefficient == pytest.approx(0.5 * 1.02**2, rel=1e-12)


def test_kl_controller_when_fixed_or_absent() -> None:
    fixed = built(KLConfig(in_reward=0.1))
    fixed.update(100.0, 10_000)
    assert fixed.coefficient == 0.1
    assert KLController.from_config(KLConfig(in_loss=0.1)) is None


def test_kl_controller_with_nan_raises_and_keeps_coefficient() -> None:
    controller = built()
    with pytest.raises(NonFiniteError):
        controller.update(float("nan"), 64)
    assert controller.coefficient == 0.5
