"""Log-probabilities from a GPU's matrix products have the precision of the operands' dtype, also with two tiles."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.megatron.step import tiles
from mcore_rl.megatron.step.logprobs import linear_logp_entropy
from tests.distributed.projection import assert_close, fused, reference

pytestmark = pytest.mark.cuda

# Relative to the largest entry. float32 means no TF32, whose error would be 1e-3. With bfloat16 operands (the
# reference uses the rounded ones) the backward pass also rounds the logits' gradient and the results to bfloat16,
# 2^-9.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
TOKENS, HIDDEN, VOCABULARY = 8192, 1024, 129_280


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tile", [1 << 25, 8 * 50], ids=["one tile", "many tiles"])
def test_values_and_gradients_are_those_of_float64(
    dtype: torch.dtype, temperature: float, tile: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiles.TILE_ELEMENTS, device, tile)
    ours = fused(dtype, temperature, 8, slice(None), device=device)
    assert ours["logp"].device.type == device
    assert ours["logp"].dtype == torch.float32
    assert_close(ours, reference(dtype, temperature), TOLERANCE[dtype])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_of_float32_head_are_rounded_once(temperature: float, device: str) -> None:
    """Only the results are rounded to bfloat16, as on a CPU; the gradient of the logits is not."""
    ours = fused(torch.bfloat16, temperature, 8, slice(None), device=device, float32_head=True)
    assert_close(ours, reference(torch.bfloat16, temperature), 4e-3)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_log_probabilities_do_not_round_as_their_operands_do(dtype: torch.dtype, device: str) -> None:
    """Products of bfloat16 numbers are exact in float32, in which they are added; a bfloat16 logit would have an error
    of 0.1."""
    ours, expected = fused(dtype, 1.0, 8, slice(None), device=device), reference(dtype, 1.0)
    for name in ("logp", "entropy"):
        assert_close({name: ours[name]}, {name: expected[name]}, 1e-5)


@pytest.mark.cuda(only=True)
def test_a_pass_takes_two_tiles_beside_its_operands() -> None:
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device="cuda")
    targets = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        linear_logp_entropy(hidden, weight, targets)  # allocates the workspaces of the libraries
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        linear_logp_entropy(hidden, weight, targets)
    rise = torch.cuda.max_memory_allocated() - before
    statistics_bytes = 16 * 8 * TOKENS
    assert rise <= 2 * 4 * tiles.TILE_ELEMENTS["cuda"] + statistics_bytes
    assert rise < 4 * TOKENS * VOCABULARY / 8
