"""The fused projection and softmax over kept entries compared with a masked log_softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed import group as process_group

from mcore_rl.megatron.step import set_groups, tiles
from mcore_rl.megatron.step.kept_tokens import KeptTokens
from mcore_rl.megatron.step.logprobs import linear_logp_entropy
from mcore_rl.megatron.step.set_groups import GroupCosts
from mcore_rl.types.token_sets import TokenSets, encode_ids
from tests.distributed.launch import launch
from tests.distributed.projection import TOKENS, VOCABULARY, Results, assert_close, inputs, per_token, upstream

HALF = VOCABULARY // 2
# See test_logprobs.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-3}

# Costs with which short sets are computed for the columns of all tokens, or for those of groups of two blocks or more.
COSTS = {"all columns": GroupCosts(10**6, 0), "own columns": GroupCosts(0, 0), "joined": GroupCosts(6, 300)}


@pytest.fixture(params=list(COSTS))
def costs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_costs(request.param, monkeypatch)
    return str(request.param)


def use_costs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(set_groups.COSTS, "cpu", COSTS[name])
    monkeypatch.setattr(set_groups, "BLOCK_TOKENS", 3)


def members() -> torch.Tensor:
    """Return the sets of all tokens, each with its target: bool [T, V].

    They have one entry, several entries in one half of the vocabulary only, or in both, or all entries; so runs are
    lists of ids and bit sets, and some shards have no entry.
    """
    generator = torch.Generator().manual_seed(7)
    _, _, targets = inputs(torch.float64)
    share = torch.tensor([0.0, 0.02, 0.04, 0.3, 0.9, 1.0])[torch.arange(TOKENS) % 6]
    found = torch.rand(TOKENS, VOCABULARY, generator=generator) < share[:, None]
    one_half = torch.arange(TOKENS) % 5 == 3
    found[one_half] &= (torch.arange(VOCABULARY) < HALF) == (targets[one_half] < HALF)[:, None]
    return found.scatter(1, targets[:, None], True)


def sets_of(found: torch.Tensor) -> TokenSets:
    return TokenSets.of([encode_ids(np.flatnonzero(row), found.shape[1]) for row in found.numpy()])


def masked(dtype: torch.dtype, temperature: float | None, chunk: int, shard: slice, group: object = None) -> Results:
    hidden, weight, targets = inputs(dtype)
    hidden, weight = hidden.requires_grad_(), weight[shard].contiguous().requires_grad_()
    logp, entropy = linear_logp_entropy(
        *(hidden, weight, targets),
        temperature=per_token(temperature),
        chunk_tokens=chunk,
        group=group,
        kept=KeptTokens.of(sets_of(members()), torch.from_numpy),
    )
    grad_logp, grad_entropy = upstream()
    ((logp * grad_logp).sum() + (entropy * grad_entropy).sum()).backward()
    return {"logp": logp, "entropy": entropy, "hidden": hidden.grad, "weight": weight.grad}


def reference(dtype: torch.dtype, temperature: float | None) -> Results:
    """Compute the masked log_softmax in float64, with operands rounded to `dtype`."""
    hidden, weight, targets = inputs(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    divisor = per_token(temperature)
    divisor = divisor.double()[:, None] if isinstance(divisor, torch.Tensor) else divisor
    log_p = torch.log_softmax((hidden @ weight.t() / divisor).masked_fill(~members(), -torch.inf), -1)
    logp = log_p.gather(1, targets[:, None])[:, 0]
    inside = log_p.masked_fill(~members(), 0.0)
    entropy = -(log_p.exp() * inside).sum(-1)
    grad_logp, grad_entropy = upstream()
    ((logp * grad_logp).sum() + (entropy * grad_entropy).sum()).backward()
    return {"logp": logp, "entropy": entropy, "hidden": hidden.grad, "weight": weight.grad}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("temperature", [1.0, None])
@pytest.mark.parametrize(("chunk", "tile", "in_product"), [(1024, 1 << 19, True), (8, 8 * 50, False), (5, 1, True)])
@pytest.mark.usefixtures("costs")
def test_masked_logp_with_any_tiling_equals_masked_softmax(
    *,
    dtype: torch.dtype,
    temperature: float | None,
    chunk: int,
    tile: int,
    in_product: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(tiles.TILE_ELEMENTS, "cpu", tile)
    monkeypatch.setitem(tiles.MASK_IN_PRODUCT, "cpu", in_product)  # False: as on GPUs
    assert_close(masked(dtype, temperature, chunk, slice(None)), reference(dtype, temperature), TOLERANCE[dtype])


def test_masked_logp_on_two_shards_equals_one() -> None:
    ranks = launch(_shard_worker, 2)
    for costs in COSTS:
        parts = [{name: torch.from_numpy(value) for name, value in rank[costs].items()} for rank in ranks]
        joined = {
            "hidden": parts[0]["hidden"] + parts[1]["hidden"],
            "weight": torch.cat([part["weight"] for part in parts]),
        }
        for part in parts:
            ours = {"logp": part["logp"], "entropy": part["entropy"], **joined}
            assert_close(ours, reference(torch.float32, None), TOLERANCE[torch.float32])
            assert part["negative"].tolist() == [0.0] * TOKENS


def _shard_worker(rank: int) -> dict[str, dict[str, np.ndarray]]:
    results, shard = {}, slice(rank * HALF, (rank + 1) * HALF)
    for costs in COSTS:
        with pytest.MonkeyPatch.context() as patch:
            use_costs(costs, patch)
            found = masked(torch.float32, None, 8, shard, process_group.WORLD)
            found["negative"] = _negative_logits(shard)
        results[costs] = {name: value.detach().numpy() for name, value in found.items()}
    return results


def _negative_logits(shard: slice) -> torch.Tensor:
    """Compute logp of sets with one entry, whose logit is -320: the other shard must not count as a logit of 0."""
    hidden, weight, targets = (torch.ones_like(each) for each in inputs(torch.float32))
    kept = KeptTokens.of(sets_of(torch.arange(VOCABULARY).expand(TOKENS, -1) == targets[:, None]), torch.from_numpy)
    return linear_logp_entropy(-20 * hidden, weight[shard], targets, group=process_group.WORLD, kept=kept)[0]


@pytest.mark.usefixtures("costs")
def test_masked_logp_gradient_outside_sets_is_exactly_zero() -> None:
    hidden, weight, targets = inputs(torch.float32)
    targets = torch.where(targets % 3 == 1, targets - 1, targets)
    usable = torch.arange(VOCABULARY) % 3 != 1
    found = (members() & usable).scatter(1, targets[:, None], True)
    weight.requires_grad_()
    logp, entropy = linear_logp_entropy(hidden, weight, targets, kept=KeptTokens.of(sets_of(found), torch.from_numpy))
    (logp.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    # Every entry that some token keeps has a gradient, and no other one.
    assert ((weight.grad != 0).any(1) == usable).all()
    single = found.sum(1) == 1
    assert single.any()
    assert not logp[single].any()
    assert not entropy[single].any()


@pytest.mark.usefixtures("costs")
def test_masked_logp_of_whole_vocabulary_is_bit_identical() -> None:
    """The control: a set with all entries changes nothing, not even rounding."""
    everything = KeptTokens.of(sets_of(torch.ones(TOKENS, VOCABULARY, dtype=torch.bool)), torch.from_numpy)
    results = []
    for kept in (None, everything):
        hidden, weight, targets = inputs(torch.float32)
        hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
        logp, entropy = linear_logp_entropy(hidden, weight, targets, kept=kept)
        (logp.sum() + entropy.sum()).backward()
        results.append((logp, entropy, hidden.grad, weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.usefixtures("costs")
def test_masked_logp_ignores_vocabulary_padding() -> None:
    hidden, weight, targets = inputs(torch.float64)
    vocab_size, found = VOCABULARY - 7, members()[:, : VOCABULARY - 7]
    targets %= vocab_size
    found = found.scatter(1, targets[:, None], True)
    kept = KeptTokens.of(sets_of(found), torch.from_numpy)
    logp, _ = linear_logp_entropy(hidden, weight, targets, vocab_size=vocab_size, kept=kept, chunk_tokens=8)
    logits = (hidden @ weight[:vocab_size].t()).masked_fill(~found, -torch.inf)
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logp, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("costs")
def test_masked_logp_non_finite_state_reaches_its_token() -> None:
    """A NaN must not disappear behind the mask."""
    hidden, weight, targets = inputs(torch.float32)
    hidden[3, 2] = torch.nan
    logp, _ = linear_logp_entropy(hidden, weight, targets, kept=KeptTokens.of(sets_of(members()), torch.from_numpy))
    assert torch.isfinite(logp).tolist() == [token != 3 for token in range(TOKENS)]


def test_masked_logp_wrong_number_of_sets_is_rejected() -> None:
    hidden, weight, targets = inputs(torch.float32)
    kept = KeptTokens.of(sets_of(members()[1:]), torch.from_numpy)
    with pytest.raises(ValueError, match=f"{TOKENS - 1} sets of kept entries for {TOKENS} tokens"):
        linear_logp_entropy(hidden, weight, targets, kept=kept)
    mixed = TokenSets.joined([sets_of(torch.ones(1, 64).bool()), sets_of(torch.ones(1, 200).bool())])
    with pytest.raises(ValueError, match=r"bit sets of one vocabulary have \[3, 8\] words"):
        KeptTokens.of(mixed, torch.from_numpy)


def test_kept_tokens_of_no_tokens_serve_dummy_batches() -> None:
    hidden, weight, targets = inputs(torch.float32)
    kept = KeptTokens.of(TokenSets.empty(0), torch.from_numpy)
    logp, entropy = linear_logp_entropy(hidden[:0], weight, targets[:0], kept=kept)
    assert logp.shape == entropy.shape == (0,)
    assert kept.num_ids == 0
