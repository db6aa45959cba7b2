"""Training on truncated sampling: log-probabilities of policy and reference, loss and gradients over the recorded sets
equal a masked softmax on transformers' model in float64, in every layout and division into micro-batches.

One launch per number of ranks runs all its cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.step.microbatches import Packing, build_microbatches
from mcore_rl.types import TokenSets, TrajectoryBuffers
from mcore_rl.types.token_sets import encode_ids
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import (
    ONE_MICROBATCH,
    SMALL,
    accumulate,
    case_parameters,
    check_gradients,
    launch_cases,
)
from tests.tiny_models import VOCABULARY, write_tiny_model

# float32 against float64, as in test_reference
LOGP_TOLERANCE = 2e-5
CASES: dict[int, dict[str, tuple[str, dict[str, Any], int]]] = {
    1: {"moe": ("moe", {}, ONE_MICROBATCH), "moe split": ("moe", {}, SMALL)},
    2: {
        "dense dp2": ("dense", {}, SMALL),
        "dense fsdp2": ("dense", {"strategy": "fsdp2"}, SMALL),
        "dense tp2": ("dense", {"tp": 2}, SMALL),
        "odd tp2": ("odd", {"tp": 2}, SMALL),
        "dense pp2": ("dense", {"pp": 2}, SMALL),
        "dense cp2": ("dense", {"cp": 2}, SMALL),
        "moe ep2": ("moe", {"ep": 2}, SMALL),
    },
    4: {"moe tp2 cp2": ("moe", {"tp": 2, "cp": 2}, SMALL)},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "moe": ("qwen3_moe", {}),
    # A vocabulary that tensor-parallel ranks do not divide.
    "odd": ("qwen3", {"num_key_value_heads": 1, "vocab_size": VOCABULARY + 1}),
}
SAMPLES = sorted(s for update in policy_batch.UPDATES for s in update)
unmasked_chunks, unmasked_logp = policy_batch.chunks, policy_batch.reference_logp


def members(sample: int, vocab_size: int) -> np.ndarray:
    """Return the sets of a response: bool [T, V]. Each has the token itself; the sizes are between 1 and V."""
    generator = np.random.default_rng(600 + sample)
    count = policy_batch.RESPONSES[sample]
    share = np.array([0.0, 0.01, 0.05, 0.5, 1.0])[np.arange(count) % 5]
    found = generator.random((count, vocab_size)) < share[:, None]
    found[np.arange(count), policy_batch.sequence(sample)[policy_batch.PROMPTS[sample] :]] = True
    return found


def masked_chunks(vocab_size: int) -> list[TrajectoryBuffers]:
    """The policy's batch with sets; tokens that a tool wrote have none."""
    first, numbers = [], iter(range(len(policy_batch.PROMPTS)))
    for buffers in unmasked_chunks():
        runs: list[np.ndarray] = []
        for _ in buffers.prompt_tokens:
            sample = next(numbers)
            sampled = policy_batch.trained(sample) > 0
            rows = members(sample, vocab_size)
            runs += [
                encode_ids(np.flatnonzero(row) if own else np.empty(0, np.int64), vocab_size)
                for row, own in zip(rows, sampled, strict=True)
            ]
        sets = TokenSets.of(runs)
        first.append(replace(buffers, kept_words=sets.words, kept_offsets=sets.offsets))
    return first


def masked_logp(model: Any, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probability and entropy of each trained token over its set, as policy_batch.reference_logp."""
    tokens = torch.from_numpy(policy_batch.sequence(sample).astype(np.int64))
    own = policy_batch.trained(sample) > 0
    positions = policy_batch.PROMPTS[sample] + np.flatnonzero(own)
    divisor = torch.from_numpy(policy_batch.temperatures(sample)[own]).double().nan_to_num(policy_batch.TEMPERATURE)
    logits = model(tokens[None]).logits[0][positions - 1] / divisor[:, None]
    outside = torch.from_numpy(~members(sample, logits.shape[-1])[own])
    log_p = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(outside, 0.0)).sum(-1)
    return log_p.gather(1, tokens[positions][:, None])[:, 0], entropy


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(write_tiny_model(root / name, kind, **changes)) for name, (kind, changes) in MODELS.items()}


@pytest.fixture(scope="module")
def expected(directories: dict[str, str]) -> Iterator[dict[str, Any]]:
    """By model: loss and gradients, and log-probabilities of every sample."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_batch, "reference_logp", masked_logp)
        for name, directory in directories.items():
            loss, gradients = policy_batch.reference_gradients(directory, policy_batch.UPDATES[0])
            with torch.no_grad():
                model = policy_batch.reference_model(directory)
                logp = {sample: masked_logp(model, sample)[0].numpy() for sample in SAMPLES}
            found[name] = loss, gradients, logp
        yield found


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[Any]]:
    return launch_cases(_worker, CASES, directories)


def _worker(rank: int, directories: dict[str, str], cases: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, (kind, parallel, tokens) in cases.items():
        config = policy_batch.config(directories[kind], parallel, tokens)
        config.rollout.top_p, config.rollout.keep_sampling_mask = 0.9, True
        # The reference has the policy's weights, so that the gradient of the k3 estimate is 0.
        config.algorithm.kl.in_loss, config.algorithm.kl.loss_kind = 0.5, "low_var"
        config.reference.hf_path = directories[kind]
        vocab_size = VOCABULARY + (kind == "odd")
        policy_batch.chunks = lambda size=vocab_size: masked_chunks(size)
        actor = policy_batch.build_actor(config)
        batch, metrics = actor.recompute_logp(policy_batch.shares(actor), policy_batch.chunks())
        batch = actor.reference_logp(batch)
        place = actor.layout.coordinates(rank)
        mine = {s: policy_batch.held(s, actor.layout, rank) for s in batch.ref_logp}
        passes = [
            {s: (mine[s], logp.numpy()) for s, logp in found.items()} if place.tp == 0 else {}
            for found in (batch.old_logp, batch.ref_logp)
        ]
        actor.config.algorithm.kl.in_loss = 0.0
        actor.objective.losses[0].algorithm.kl.in_loss = 0.0
        loss, _ = accumulate(actor)
        found[name] = loss, policy_batch.gradient_pieces(actor), passes, metrics
    return found


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_masked_update_in_every_layout_equals_transformers(size: int, case: str, results: Any, expected: Any) -> None:
    loss, gradients, logp = expected[CASES[size][case][0]]
    assert sum(rank[0] for rank in results[case]) == pytest.approx(loss, rel=1e-5)
    check_gradients([rank[1] for rank in results[case]], gradients)
    for number, samples in enumerate((policy_batch.UPDATES[1], SAMPLES)):
        whole = {sample: np.full(len(logp[sample]), np.nan) for sample in samples}
        for _, _, passes, _ in results[case]:
            for sample, (held, values) in passes[number].items():
                whole[sample][held] = values
        for sample in samples:
            np.testing.assert_allclose(whole[sample], logp[sample], rtol=0, atol=LOGP_TOLERANCE)


def test_mask_changes_the_gradient(directories: dict[str, str], expected: Any) -> None:
    """The control: without sets, log-probabilities and gradients are visibly different."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_batch, "reference_logp", unmasked_logp)
        _, gradients = policy_batch.reference_gradients(directories["dense"], policy_batch.UPDATES[0])
    masked = expected["dense"][1]
    apart = {name: float((masked[name] - each).abs().max() / each.abs().max()) for name, each in gradients.items()}
    assert min(apart.values()) > 1e-2, apart


def test_kept_tokens_mean_counts_the_sets(results: Any) -> None:
    (_, _, _, metrics) = results["moe"][0]
    sizes = [members(sample, VOCABULARY)[policy_batch.trained(sample) > 0].sum(1) for sample in policy_batch.UPDATES[1]]
    assert metrics["rollout/kept_tokens_mean"].value == pytest.approx(np.concatenate(sizes).mean())


def test_token_outside_its_set_is_rejected_by_sample() -> None:
    chunks = masked_chunks(VOCABULARY)
    share = policy_batch.share(policy_batch.UPDATES[0], 0, 1)
    assert all(batch.kept is not None for batch in build_microbatches(share, chunks, Packing(SMALL, masked=True)))
    # A critic, for example, does not read them.
    assert all(batch.kept is None for batch in build_microbatches(share, chunks, Packing(SMALL)))
    words = chunks[0].kept_words.copy()  # type: ignore[union-attr]
    # The first trained token of sample 0 has a set of one token, since its share is 0.
    words[0] = (words[0] + 1) % VOCABULARY
    with pytest.raises(
        McoreRLError, match=r"sample 0: the trained token \d+ is not in the set that it was sampled from"
    ):
        build_microbatches(share, [replace(chunks[0], kept_words=words), chunks[1]], Packing(SMALL, masked=True))


def test_samples_without_sets_beside_others_are_rejected() -> None:
    share = policy_batch.share(policy_batch.UPDATES[0], 0, 1)
    mixed = [masked_chunks(VOCABULARY)[0], unmasked_chunks()[1]]
    with pytest.raises(
        McoreRLError, match=r"samples \[6, 8\] have no record of the sets that their tokens were sampled"
    ):
        build_microbatches(share, mixed, Packing(ONE_MICROBATCH, masked=True))
