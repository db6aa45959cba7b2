"""Attention with sinks and windows on a GPU: torch's flash attention compared with transformers in float64, and the
gradients of gpt-oss, parameter by parameter, with those on the CPU, with local layers and with those that are
installed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.distributed.sink_reference import LENGTHS, attention, gradients, row
from tests.distributed.two_updates import make_actor
from tests.gpu.engine_layers import FIELDS
from tests.gpu.ranks import launch_installed, launch_local
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.cuda


@pytest.mark.cuda(only=True)
@pytest.mark.parametrize("window", [None, 1, 128])
def test_flash_attention_with_sinks_is_that_of_float64(window: int | None) -> None:
    from mcore_rl.megatron.model.attention.context import SINGLE_RANK
    from mcore_rl.megatron.model.attention.flash import flash_attention

    inputs = [x.detach().cuda().requires_grad_() for x in row(64, dtype=torch.bfloat16)]
    ours = flash_attention(*inputs[:3], LENGTHS, SINGLE_RANK, window=window, sinks=inputs[3])
    rounded = [x.detach().double().cpu().requires_grad_() for x in inputs]
    theirs = attention(*rounded, window)
    pairs = zip((ours, *gradients(ours, inputs)), (theirs, *gradients(theirs, rounded)), strict=True)
    for found, expected in pairs:
        # bfloat16 rounds by 2^-9, a few times. A wrong mask or a missing sink gives an error as large as the values.
        assert float((found.double().cpu() - expected).abs().max() / expected.abs().max()) < 0.02


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "oss", "gpt_oss", **FIELDS["gpt_oss"]))


@pytest.fixture(scope="module")
def on_cpu(directory: str) -> dict[str, dict[str, np.ndarray]]:
    return {dtype: launch(model_gradients, 1, directory, dtype)[0] for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize("layers", ["local", "installed"])
def test_gradients_of_gpt_oss_are_those_of_the_cpu(
    layers: str, directory: str, on_cpu: dict[str, dict[str, np.ndarray]], device: str, report: Callable[[str], None]
) -> None:
    start = launch_local if layers == "local" else launch_installed
    [found] = start(model_gradients, 1, directory, "bfloat16", device=device)
    expected, rounded = on_cpu["float32"], on_cpu["bfloat16"]
    assert found.keys() == expected.keys()
    assert any("softmax_offset" in name for name in found)
    errors = {name: relative(found[name], expected[name]) for name in expected}
    worst = max(errors, key=errors.__getitem__)
    report(f"largest relative error {errors[worst]:.3f} of {worst}")
    # Some gradients, like a router's bias, are small differences of large terms and have an error of 0.4 on the CPU
    # too. Most have one of 0.02; a wrong mask or scale gives an error near 1, and a gradient of zeros one of 1.
    for name, error in errors.items():
        assert error < min(3 * relative(rounded[name], expected[name]) + 0.05, 0.7), f"{name}: {error:.3f}"


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def model_gradients(rank: int, directory: str, dtype: str) -> dict[str, np.ndarray]:
    """Return the gradients of the first update's samples by canonical name."""
    from mcore_rl.megatron.model.names import canonical_name

    actor, shares = make_actor(directory, {}, model={"dtype": dtype})
    batch, _ = actor.recompute_logp(shares[:1], policy_batch.chunks())
    actor.accumulate_gradients(batch, 0)
    (chunk,) = actor.chunks
    names = {canonical_name(chunk, name): parameter for name, parameter in chunk.named_parameters()}
    return {name: parameter.main_grad.float().cpu().numpy().copy() for name, parameter in names.items()}
