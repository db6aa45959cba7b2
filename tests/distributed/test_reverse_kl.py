"""Distances between two distributions over the vocabulary, against torch's log_softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed import group as process_group

from mcore_rl.megatron.step import tiles
from mcore_rl.megatron.step.reverse_kl import (
    linear_logp_at,
    linear_reverse_kl,
    linear_top_k,
    top_k_reverse_kl,
)
from mcore_rl.megatron.step.tiles import Projection
from tests.distributed.launch import launch
from tests.distributed.projection import TOKENS, VOCABULARY, inputs, per_token, upstream

TEACHER_HIDDEN, K = 11, 9
KINDS = ("whole", "bucket", "renormalize")
# Relative to the largest entry of a result, as in test_logprobs: float32 logits of 60 are off by 4e-6.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}
Results = dict[str, torch.Tensor]


def teacher_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(15)
    hidden = torch.randn(TOKENS, TEACHER_HIDDEN, generator=generator)
    return hidden.to(dtype), (2 * torch.randn(VOCABULARY, TEACHER_HIDDEN, generator=generator)).to(dtype)


def plain(kind: str, dtype: torch.dtype, temperature: float | None, vocabulary: int = VOCABULARY) -> Results:
    """Compute the KL by its definition in float64, with operands rounded to `dtype`, and its gradients."""
    hidden, weight, _ = inputs(dtype)
    teacher_hidden, teacher_weight = teacher_inputs(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight[:vocabulary].double().requires_grad_()
    divisor = torch.as_tensor(per_token(temperature), dtype=torch.float64).expand(TOKENS)[:, None]
    log_p = torch.log_softmax(hidden @ weight.t() / divisor, -1)
    log_q = torch.log_softmax(teacher_hidden.double() @ teacher_weight[:vocabulary].double().t() / divisor, -1)
    if kind != "whole":
        best = log_q.topk(K).indices
        p, q = log_p.exp().gather(1, best), log_q.exp().gather(1, best)
        if kind == "bucket":
            others = torch.ones_like(log_p).scatter(1, best, 0.0) > 0
            p = torch.cat((p, (log_p.exp() * others).sum(1, keepdim=True)), 1)
            q = torch.cat((q, (log_q.exp() * others).sum(1, keepdim=True)), 1)
        else:
            p, q = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
        log_p, log_q = p.log(), q.log()
    kl = (log_p.exp() * (log_p - log_q)).sum(1)
    (kl * upstream()[0]).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {"kl": kl.detach(), "hidden": hidden.grad, "weight": weight.grad}


def fused(
    kind: str, dtype: torch.dtype, temperature: float | None, shard: slice = slice(None), **options: object
) -> Results:
    """Compute the KL with the rows `shard` of both projections."""
    hidden, weight, _ = inputs(dtype)
    teacher_hidden, teacher_weight = teacher_inputs(dtype)
    hidden, weight = hidden.requires_grad_(), weight[shard].contiguous().requires_grad_()
    policy, teacher = (
        Projection(rows, per_token(temperature), chunk_tokens=8, **options)  # type: ignore[arg-type]
        for rows in (weight, teacher_weight[shard].contiguous())
    )
    if kind == "whole":
        kl = linear_reverse_kl(hidden, policy, teacher_hidden, teacher)
    else:
        ids, teacher_logp = linear_top_k(teacher_hidden, teacher, K)
        kl = top_k_reverse_kl(linear_logp_at(hidden, policy, ids), teacher_logp, kind)
    (kl * upstream()[0].to(kl)).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {"kl": kl.detach(), "hidden": hidden.grad, "weight": weight.grad}


def check(found: Results, expected: Results, tolerance: float) -> None:
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name].double(), wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7, None])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [1 << 19, 8 * 50, 1])
def test_reverse_kl_with_any_tiling_equals_definition(
    dtype: torch.dtype, temperature: float | None, kind: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", tile)
    found = fused(kind, dtype, temperature)
    assert found["kl"].dtype == dtype
    check(found, plain(kind, dtype, temperature), TOLERANCE[dtype])


@pytest.mark.parametrize("padded", [0, 7, 65])
def test_reverse_kl_on_two_shards_equals_definition(padded: int) -> None:
    """With padding, the second shard has fewer real rows than the top k, or none."""
    ranks = launch(_on_shards, 2, VOCABULARY - padded)
    for kind in KINDS:
        of_ranks = [{name: torch.from_numpy(value) for name, value in rank[kind].items()} for rank in ranks]
        joined = {
            "hidden": of_ranks[0]["hidden"] + of_ranks[1]["hidden"],
            "weight": torch.cat([part["weight"] for part in of_ranks]),
        }
        assert not joined["weight"][VOCABULARY - padded :].any()
        joined["weight"] = joined["weight"][: VOCABULARY - padded]
        for part in of_ranks:
            expected = plain(kind, torch.float64, None, VOCABULARY - padded)
            check({"kl": part["kl"], **joined}, expected, TOLERANCE[torch.float64])


def _on_shards(rank: int, vocab_size: int) -> dict[str, dict[str, np.ndarray]]:
    shard = slice(rank * VOCABULARY // 2, (rank + 1) * VOCABULARY // 2)
    options = {"group": process_group.WORLD, "vocab_size": vocab_size}
    results = {kind: fused(kind, torch.float64, None, shard, **options) for kind in KINDS}
    # A dummy micro-batch.
    weight = torch.ones(VOCABULARY // 2, 3)
    projection = Projection(weight, group=process_group.WORLD)
    empty = torch.empty(0, 3)
    assert linear_reverse_kl(empty, projection, empty, projection).shape == (0,)
    ids, logp = linear_top_k(empty, projection, K)
    assert (*ids.shape, *logp.shape) == (0, K, 0, K + 1)
    assert linear_logp_at(empty, projection, ids).shape == (0, K + 1)
    return {kind: {name: value.numpy() for name, value in result.items()} for kind, result in results.items()}


def test_top_k_kl_rises_to_the_whole_kl_and_equal_models_have_none() -> None:
    """Merging outcomes never raises a KL; k = all but one token merges nothing."""
    hidden, weight, _ = inputs(torch.float64)
    teacher_hidden, teacher_weight = teacher_inputs(torch.float64)
    policy, teacher = Projection(weight, 4.0), Projection(teacher_weight, 4.0)
    whole = linear_reverse_kl(hidden, policy, teacher_hidden, teacher)
    previous = torch.zeros_like(whole)
    for k in (1, 2, 10, 60, VOCABULARY - 1):
        ids, teacher_logp = linear_top_k(teacher_hidden, teacher, k)
        kl = top_k_reverse_kl(linear_logp_at(hidden, policy, ids), teacher_logp, "bucket")
        assert (kl >= previous - 1e-12).all()
        assert (kl <= whole + 1e-12).all()
        previous = kl
    torch.testing.assert_close(previous, whole, rtol=0, atol=1e-12)
    assert linear_reverse_kl(hidden, policy, hidden, policy).abs().max() < 1e-12


def test_reverse_kl_of_other_vocabularies_raises() -> None:
    hidden, weight, _ = inputs(torch.float64)
    with pytest.raises(ValueError, match="the policy has 120 rows of a vocabulary of None, and the teacher 100"):
        linear_reverse_kl(hidden, Projection(weight), hidden, Projection(weight[:100]))
