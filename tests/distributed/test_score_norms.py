"""Norms of the score from the fused projection, compared with torch's log_softmax and its gradient in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed import group as process_group

from mcore_rl.megatron.step import tiles
from mcore_rl.megatron.step.score_norms import linear_score_norms
from mcore_rl.megatron.step.tiles import Projection
from tests.distributed.launch import launch
from tests.distributed.projection import HIDDEN, VOCABULARY, inputs, per_token

TEMPERATURES = (1.0, 0.7, None)
"""Temperatures of all tokens; None: a different one for each token."""
# Absolute, for values up to 2: a float32 logit of 60 is off by up to 4e-6, the relative error of its probability.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}


def reference(dtype: torch.dtype, temperature: float | None, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Squared norm of the gradient of the target's log-probability with respect to the scaled logits."""
    hidden, weight, targets = inputs(dtype)
    divisor = per_token(temperature, "cpu")
    divisor = divisor.double()[:, None] if isinstance(divisor, torch.Tensor) else divisor
    logits = (hidden.double() @ weight.double()[:vocabulary].t() / divisor).requires_grad_()
    torch.log_softmax(logits, -1).gather(1, (targets % vocabulary)[:, None]).sum().backward()
    assert logits.grad is not None
    return logits.grad.square().sum(-1)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("chunk", "tile"), [(1024, 1 << 19), (8, 8 * 50), (5, 1)])
def test_score_norms_with_any_tiling_equal_the_gradient(
    dtype: torch.dtype, temperature: float | None, chunk: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", tile)
    hidden, weight, targets = inputs(dtype)
    found = linear_score_norms(hidden, Projection(weight, per_token(temperature, "cpu"), chunk), targets)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), reference(dtype, temperature), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("vocabulary", [VOCABULARY, VOCABULARY - 7, VOCABULARY // 2])
def test_score_norms_on_two_shards_equal_the_whole_vocabulary(vocabulary: int) -> None:
    """The second shard ends with padding, or is only padding."""
    ranks = launch(_shard_worker, 2, vocabulary)
    for index, temperature in enumerate(TEMPERATURES):
        expected = reference(torch.float64, temperature, vocabulary).numpy()
        for rank in ranks:
            np.testing.assert_allclose(rank[index], expected, rtol=0, atol=1e-12)
    assert all(np.array_equal(a, b) for a, b in zip(*ranks, strict=True))


def _shard_worker(rank: int, vocabulary: int) -> list[np.ndarray]:
    hidden, weight, targets = inputs(torch.float64)
    half, found = VOCABULARY // 2, []
    for temperature in TEMPERATURES:
        shard = Projection(
            weight[rank * half : (rank + 1) * half], per_token(temperature, "cpu"), 8, process_group.WORLD, vocabulary
        )
        norms = linear_score_norms(hidden, shard, targets % vocabulary)
        found.append(norms.numpy())
    shard = Projection(torch.ones(half, HIDDEN), group=process_group.WORLD)
    # A dummy micro-batch.
    assert linear_score_norms(torch.empty(0, HIDDEN), shard, torch.empty(0, dtype=torch.int64)).shape == (0,)
    return found


def test_score_norms_of_a_certain_token_are_zero() -> None:
    hidden, projection = torch.ones(1, 1), Projection(torch.tensor([[200.0], [0.0], [-200.0]]))
    assert linear_score_norms(hidden, projection, torch.tensor([0])).tolist() == [0]
    assert linear_score_norms(hidden, projection, torch.tensor([1])).tolist() == [2]
