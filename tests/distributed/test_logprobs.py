"""The fused projection and softmax compared with torch's log_softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed import group as process_group

from mcore_rl.megatron.step import tiles
from mcore_rl.megatron.step.logprobs import linear_logp_entropy
from tests.distributed.launch import launch
from tests.distributed.projection import HIDDEN, TOKENS, VOCABULARY, assert_close, fused, inputs, reference

TEMPERATURES = (1.0, 0.7, None)
"""Temperatures of all tokens; None: a different one for each token."""
# Relative to the largest entry: a float32 logit of 60 is off by up to 4e-6, and that is the relative error of its
# probability. bfloat16 operands (the reference sees the rounded ones) add only the rounding of the gradients returned.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("chunk", "tile"), [(1024, 1 << 19), (8, 8 * 50), (5, 1)])
def test_linear_logp_entropy_with_any_tiling_equals_log_softmax(
    dtype: torch.dtype, temperature: float | None, chunk: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", tile)
    ours = fused(dtype, temperature, chunk, slice(None))
    assert ours["logp"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert ours["hidden"].dtype == ours["weight"].dtype == dtype
    assert_close(ours, reference(dtype, temperature), TOLERANCE[dtype])


def test_linear_logp_entropy_on_two_shards_equals_one() -> None:
    ranks = launch(_shard_worker, 2)
    for index, temperature in enumerate(TEMPERATURES):
        parts = [{name: torch.from_numpy(value) for name, value in rank[index].items()} for rank in ranks]
        joined = {
            "hidden": parts[0]["hidden"] + parts[1]["hidden"],
            "weight": torch.cat([part["weight"] for part in parts]),
        }
        for part in parts:  # every rank has the whole result
            ours = {"logp": part["logp"], "entropy": part["entropy"], **joined}
            assert_close(ours, reference(torch.float32, temperature), TOLERANCE[torch.float32])
    assert np.array_equal(ranks[0][0]["logp"], ranks[1][0]["logp"])


def _shard_worker(rank: int) -> list[dict[str, np.ndarray]]:
    half = VOCABULARY // 2
    shard = slice(rank * half, (rank + 1) * half)
    results = [fused(torch.float32, temperature, 8, shard, process_group.WORLD) for temperature in TEMPERATURES]
    empty = torch.empty(0, HIDDEN, requires_grad=True)
    logp, entropy = linear_logp_entropy(
        empty, torch.ones(half, HIDDEN), torch.empty(0, dtype=torch.int64), group=process_group.WORLD
    )
    assert logp.shape == entropy.shape == (0,)  # a dummy micro-batch
    return [{name: value.detach().numpy() for name, value in result.items()} for result in results]


@pytest.mark.parametrize("vocab_size", [VOCABULARY - 7, VOCABULARY // 2])
def test_linear_logp_entropy_ignores_vocabulary_padding(vocab_size: int) -> None:
    """Two ranks; the second rank's shard is partly or entirely padding."""
    hidden, weight, targets = inputs(torch.float64)
    hidden.requires_grad_()
    weight = weight[:vocab_size].requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.t(), -1)
    logp = log_p.gather(1, (targets % vocab_size)[:, None])[:, 0]
    (logp.sum() - (log_p.exp() * log_p).sum()).backward()
    ranks = launch(_padded_worker, 2, vocab_size)
    gradient = np.concatenate([rank["weight"] for rank in ranks])
    assert not gradient[vocab_size:].any()
    for ours, theirs in (
        (ranks[0]["logp"], logp.detach()),
        (ranks[1]["logp"], logp.detach()),
        (sum(rank["hidden"] for rank in ranks), hidden.grad),
        (gradient[:vocab_size], weight.grad),
    ):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-12 * float(theirs.abs().max()))


def _padded_worker(rank: int, vocab_size: int) -> dict[str, np.ndarray]:
    hidden, weight, targets = inputs(torch.float64)
    half = VOCABULARY // 2
    hidden, weight = hidden.requires_grad_(), weight[rank * half : (rank + 1) * half].contiguous().requires_grad_()
    logp, entropy = linear_logp_entropy(
        hidden, weight, targets % vocab_size, group=process_group.WORLD, vocab_size=vocab_size, chunk_tokens=8
    )
    (logp.sum() + entropy.sum()).backward()
    return {"logp": logp.detach().numpy(), "hidden": hidden.grad.numpy(), "weight": weight.grad.numpy()}


def test_linear_logp_without_entropy_is_unchanged() -> None:
    grads = []
    for compute_entropy in (True, False):
        hidden, weight, targets = inputs(torch.float32)
        hidden.requires_grad_()
        logp, entropy = linear_logp_entropy(hidden, weight, targets, compute_entropy=compute_entropy)
        logp.sum().backward()
        grads.append((logp.detach(), hidden.grad))
    assert not entropy.any()
    assert not entropy.requires_grad
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_linear_logp_of_non_finite_state_affects_its_token_only() -> None:
    hidden, weight, targets = inputs(torch.float32)
    hidden[3, 2] = torch.nan
    logp, _ = linear_logp_entropy(hidden, weight, targets)
    assert torch.isfinite(logp).tolist() == [token != 3 for token in range(TOKENS)]


def test_linear_logp_entropy_needs_memory_of_two_tiles() -> None:
    tokens, vocabulary = 512, 20_000
    hidden, weight = torch.randn(tokens, 8), torch.randn(vocabulary, 8, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile, torch.no_grad():
        linear_logp_entropy(hidden, weight, targets, chunk_tokens=128)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= 2 * 4 * tiles.TILE_ELEMENTS["cpu"]
    assert largest < tokens * vocabulary * 4 / 8
