"""Models of TransformerEngine's layers on a GPU: their precision compared with local layers, the selected attention,
the optimizer, FP8, and extra states in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import engine_layers
from tests.gpu.ranks import launch_installed
from tests.tiny_models import reference_logits, write_tiny_model

pytestmark = [pytest.mark.cuda, pytest.mark.te]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    kinds = engine_layers.FIELDS.items()
    return {kind: str(write_tiny_model(root / kind, kind, **fields)) for kind, fields in kinds}


@pytest.mark.parametrize("kind", engine_layers.FIELDS)
def test_bfloat16_is_as_near_to_float32_as_that_of_local_layers(
    kind: str, directories: dict[str, str], report: Callable[[str], None]
) -> None:
    [ours] = launch_installed(engine_layers.logits, 1, directories[kind], device="cuda")
    expected = reference_logits(directories[kind], engine_layers.sequences())
    errors = {
        layers: max(
            float((one - other).abs().max() / other.abs().max())
            for one, other in zip(ours[layers], expected, strict=True)
        )
        for layers in ("local", "engine")
    }
    report(f"attention {ours['attention']}; relative errors {errors}")
    # A wrong scale, mask or rotation gives an error as large as the logits.
    assert errors["local"] < 0.1
    assert errors["engine"] < 2 * errors["local"] + 0.01


def test_the_optimizer_is_its_fused_adam_and_steps_as_adamw(directories: dict[str, str]) -> None:
    [(kind, worst)] = launch_installed(engine_layers.first_step, 1, directories["qwen3"], device="cuda")
    assert kind.startswith("transformer_engine.")
    assert kind.endswith("FusedAdam")
    assert worst <= 1e-6  # the step moves a main parameter by 4e-3


def test_an_update_in_blockwise_fp8_is_near_that_in_bfloat16(directories: dict[str, str]) -> None:
    losses = {}
    for fp8 in ("none", "blockwise"):
        [(loss, moved)] = launch_installed(engine_layers.update, 1, directories["qwen3"], fp8, device="cuda")
        losses[fp8] = loss
        assert moved
    # FP8 has 3 bits of mantissa, and blocks of 128 elements share a scale.
    assert losses["blockwise"] == pytest.approx(losses["none"], rel=0.1)


def test_the_scales_of_fp8_come_back_with_a_checkpoint(directories: dict[str, str], tmp_path: Path) -> None:
    """FP8 scales are in _extra_state instead of in tensors."""
    arguments = (directories["qwen3"], str(tmp_path))
    [(saved, resumed)] = launch_installed(engine_layers.save_and_resume, 1, *arguments, device="cuda")
    assert any(scale != 1 for scales in saved.values() for scale in scales)  # 1 before the first update
    # Loading also creates the state of attention, which computes in bfloat16.
    assert {name: resumed[name] for name in saved} == saved
