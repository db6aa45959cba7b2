"""The controller of the entropy bonus compared with calculations by hand, arXiv 2505.22312."""

from __future__ import annotations

import pytest

from mcore_rl.algorithms.entropy_controller import EntropyController
from mcore_rl.config.algorithm import AlgorithmConfig, EntropyControlConfig
from mcore_rl.errors import NonFiniteError


def built(initial: float = 0.0, **control: float) -> EntropyController:
    section = EntropyControlConfig(**{"target": 0.2, **control})
    controller = EntropyController.from_config(AlgorithmConfig(entropy_coefficient=initial, entropy_control=section))
    assert controller is not None
    return controller


def test_entropy_controller_follows_calculation_by_hand() -> None:
    controller = built(0.001)
    found = [controller.bonus]
    for entropy in (0.1, 0.15, 0.3, 0.25, 0.1, 0.2):
        controller.update(entropy)
        found.append(controller.bonus)
    # Rises while the entropy is below 0.2, falls above it, and is off after a step above it.
    assert found == pytest.approx([0.001, 0.006, 0.011, 0.0, 0.0, 0.006, 0.001])


def test_entropy_coefficient_stays_within_its_bounds() -> None:
    controller = built(minimum=0.0, maximum=0.012)
    for entropy, expected in ((0.5, 0.0), (0.1, 0.005), (0.1, 0.01), (0.1, 0.012), (0.1, 0.012), (0.5, 0.007)):
        controller.update(entropy)
        assert controller.coefficient == pytest.approx(expected)


@pytest.mark.parametrize("entropy", [0.1, 0.9])
def test_entropy_controller_resumes_with_coefficient_and_switch(entropy: float) -> None:
    first, second = built(0.02), built(0.02)
    first.update(entropy)
    second.load_state_dict(first.state_dict())
    assert second.bonus == first.bonus == (0.025 if entropy < 0.2 else 0.0)
    for controller in (first, second):
        controller.update(0.1)
    assert second.bonus == first.bonus > 0


def test_entropy_controller_is_absent_without_a_target() -> None:
    assert EntropyController.from_config(AlgorithmConfig(entropy_coefficient=0.1)) is None


def test_entropy_controller_with_nan_raises_and_keeps_coefficient() -> None:
    controller = built(0.02)
    with pytest.raises(NonFiniteError):
        controller.update(float("nan"))
    assert controller.bonus == 0.02
