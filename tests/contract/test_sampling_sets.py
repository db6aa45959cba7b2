"""The sets of truncated sampling that engines record, against the trainer's kernel and the model of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.errors import DataError
from mcore_rl.megatron.step.kept_tokens import KeptTokens
from mcore_rl.megatron.step.logprobs import linear_logp_entropy
from mcore_rl.types import Completion, GenerationRequest, SamplingOptions, TokenSets
from tests.contract.engines import (
    ATTENTION_DP,
    DIVIDED_BY_TWO,
    ON_DEMAND,
    PASS_TOKENS,
    WITH_SGLANG,
    RemoteEngine,
    start_engine,
)
from tests.tiny_models import VOCABULARY, tiny_model

TOKENS = 24
OPTIONS = {
    "top-p": SamplingOptions(TOKENS, top_p=0.9, keep_mask=True),
    "top-k": SamplingOptions(TOKENS, temperature=0.7, top_k=3, keep_mask=True),
    "min-p": SamplingOptions(TOKENS, min_p=0.3, top_p=0.8, keep_mask=True),
    "wide": SamplingOptions(TOKENS, temperature=2.0, top_p=0.99, keep_mask=True),
    "all": SamplingOptions(TOKENS, keep_mask=True),
    "unrecorded": SamplingOptions(TOKENS, top_p=0.9),
    "greedy": SamplingOptions(TOKENS, temperature=0.0, top_p=0.9, keep_mask=True),
}
RECORDED = ("top-p", "top-k", "min-p", "wide", "all")
# float32 on both sides, with another order of sums; divided by the temperature of 0.7
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3_moe", seed=3, **DIVIDED_BY_TWO)


ENGINES = [
    pytest.param(("vllm", {}), id="vllm"),
    # A pass must hold the drafts of all drafting requests.
    pytest.param(("vllm", {"draft": "ngram", "draft_tokens": 2, "draft_below": 8}), id="vllm-drafts"),
    pytest.param(("sglang", {}), id="sglang", marks=WITH_SGLANG),
    *(
        pytest.param(("sglang", keys), id=f"sglang-{name}", marks=[WITH_SGLANG, *ON_DEMAND])
        for name, keys in (("overlap", {"overlap_schedule": True}), ("tp2", {"tp": 2}), ("dp2", ATTENTION_DP))
    ),
]
"""Prompts are computed in pieces, whose last tokens are sampled and dropped."""


@pytest.fixture(scope="module", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RemoteEngine]:
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    kind, keys = request.param
    started = start_engine(kind, directory, top_p=0.9, keep_sampling_mask=True, max_batched_tokens=PASS_TOKENS, **keys)
    yield started
    started.shutdown()


def make_requests() -> list[GenerationRequest]:
    rng = np.random.default_rng(5)
    prompts = {name: rng.integers(2, VOCABULARY, size=8 + 3 * n).astype(np.int32) for n, name in enumerate(OPTIONS)}
    return [
        GenerationRequest(f"{name} {i}", prompts[name], 10 * n + i, options)
        for n, (name, options) in enumerate(OPTIONS.items())
        for i in range(2)
    ]


@pytest.fixture(scope="module")
def done(engine: RemoteEngine) -> dict[str, Completion]:
    return engine.generate(make_requests())


def trainer_logp(model: Any, request: GenerationRequest, completion: Completion, kept: TokenSets | None) -> np.ndarray:
    """Compute the log-probabilities of the response with the trainer's kernel. Shapes: [T]."""
    ids = torch.from_numpy(np.concatenate([request.token_ids, completion.token_ids]).astype(np.int64))
    first = len(request.token_ids)
    with torch.no_grad():
        hidden = model.model(ids[None]).last_hidden_state[0, first - 1 : -1]
        logp, _ = linear_logp_entropy(
            *(hidden, model.lm_head.weight, ids[first:]),
            temperature=request.sampling.temperature,
            kept=None if kept is None else KeptTokens.of(kept, torch.from_numpy),
        )
    return logp.numpy()


def test_recorded_sets_give_the_engines_logp(model: Any, done: dict[str, Completion]) -> None:
    apart = dict.fromkeys(RECORDED, 0.0)
    for request in make_requests():
        name, completion = request.request_id.split()[0], done[request.request_id]
        if name not in RECORDED:
            assert completion.kept is None
            continue
        assert completion.kept is not None
        masked = trainer_logp(model, request, completion, completion.kept)
        np.testing.assert_allclose(completion.logp, masked, rtol=0, atol=TOLERANCE)
        # The control: over all tokens, the truncated mass is missing.
        full = trainer_logp(model, request, completion, None)
        apart[name] = max(apart[name], float(np.abs(completion.logp - full).max()))
    assert apart.pop("all") < TOLERANCE
    assert min(apart.values()) > 5e-3, apart


def test_recorded_sets_equal_those_of_transformers(model: Any, done: dict[str, Completion]) -> None:
    compared = 0
    for request in make_requests():
        if request.request_id.split()[0] not in RECORDED:
            continue
        completion = done[request.request_id]
        assert completion.kept is not None
        expected, certain = transformers_sets(model, request, completion)
        compared += int(certain.sum())
        np.testing.assert_array_equal(members(completion.kept)[certain], expected[certain])
    assert compared > 0.95 * 2 * len(RECORDED) * TOKENS


def members(kept: TokenSets) -> np.ndarray:
    """Return the sets as bool [T, V]."""
    found = np.zeros((len(kept), VOCABULARY), bool)
    for token in range(VOCABULARY):
        found[:, token] = kept.contain(np.full(len(kept), token, np.int32))
    return found


def transformers_sets(model: Any, request: GenerationRequest, completion: Completion) -> tuple[np.ndarray, np.ndarray]:
    """Truncate the probabilities of transformers in float64: min-p, then top-k, then top-p of the rest.

    Returns the sets, bool [T, V], and True for tokens whose set does not depend on rounding in the engine, bool [T].
    """
    options, first = request.sampling, len(request.token_ids)
    ids = torch.from_numpy(np.concatenate([request.token_ids, completion.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, first - 1 : -1].double()
    probs = (logits / options.temperature).softmax(-1).numpy()
    order = np.argsort(-probs, axis=1)
    ordered = np.take_along_axis(probs, order, 1)
    low = ordered / (ordered[:, :1] * options.min_p) if options.min_p else np.full(ordered.shape, np.inf)
    kept = low >= 1
    if options.top_k > 0:
        kept[:, options.top_k :] = False
    left = np.where(kept, ordered, 0.0)
    before = np.cumsum(left, 1) / left.sum(1, keepdims=True) - left / left.sum(1, keepdims=True)
    kept &= (before < options.top_p) | (options.top_p == 1)
    distance = np.minimum(np.abs(low - 1).min(1), np.abs(before - options.top_p).min(1) if options.top_p < 1 else 1)
    if options.top_k > 0:
        distance = np.minimum(distance, ordered[:, options.top_k - 1] / ordered[:, options.top_k] - 1)
    found = np.zeros(probs.shape, bool)
    np.put_along_axis(found, order, kept, 1)
    return found, distance > 1e-4


def test_recorded_sets_have_the_sizes_of_their_options(done: dict[str, Completion]) -> None:
    sizes = {
        name: np.concatenate([done[f"{name} {i}"].kept.sizes() for i in range(2)])  # type: ignore[union-attr]
        for name in RECORDED
    }
    assert (sizes["top-k"] == 3).all()
    assert (sizes["all"] == VOCABULARY).all()
    assert (sizes["wide"] < VOCABULARY).all()
    assert sizes["min-p"].mean() < sizes["top-p"].mean() < sizes["wide"].mean()


def test_aborted_response_keeps_sets_and_continues(engine: RemoteEngine, done: dict[str, Completion]) -> None:
    requests = [request for request in make_requests() if request.request_id.split()[0] in RECORDED]
    engine.call("submit", requests)
    for _ in range(14):
        engine.call("step")
    partial = {each.request_id: each for each in engine.call("abort", [r.request_id for r in requests])}
    begun = [
        request for request in requests if request.request_id in partial and partial[request.request_id].token_ids.size
    ]
    assert begun
    for request in begun:
        part = partial[request.request_id]
        assert part.kept is not None
        assert len(part.kept) == len(part.token_ids)
    again = engine.generate([replace(r, partial=partial[r.request_id]) for r in begun])
    for request_id, completion in again.items():
        whole = done[request_id]
        assert completion.token_ids.tolist() == whole.token_ids.tolist()
        assert completion.kept is not None
        assert whole.kept is not None
        np.testing.assert_array_equal(completion.kept.words, whole.kept.words)
        np.testing.assert_array_equal(completion.kept.offsets, whole.kept.offsets)


def test_partial_response_without_sets_is_rejected(engine: RemoteEngine, done: dict[str, Completion]) -> None:
    request = make_requests()[0]
    whole = done[request.request_id]
    lost = replace(
        *(whole,), token_ids=whole.token_ids[:2], logp=whole.logp[:2], versions=whole.versions[:2], kept=None
    )
    with pytest.raises(DataError, match="is continued without the sampling sets of its tokens"):
        engine.generate([replace(request, partial=lost)])


@pytest.fixture
def vllm(engine: RemoteEngine) -> RemoteEngine:
    if engine.kind != "vllm":
        pytest.skip("a function of vLLM's sampler")
    return engine


def _rows_to_record(engine: Any, discarded: list[bool]) -> Any:
    """Return the rows that vLLM's sampler records of four rows: two drafts of `a`, one sample of `b` and `c`."""
    from types import SimpleNamespace

    from mcore_rl.engines.vllm import sampler

    requests = {
        name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
        for name, extra in (("a", {"keep_set": True}), ("b", None), ("c", {"keep_set": True}))
    }
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=list(requests)),
        requests=requests,
        discard_request_mask=SimpleNamespace(np=np.array(discarded)),
    )
    return sampler._rows_to_record(runner, np.array([0, 0, 1, 2]), np.array([7, 8, 5, 3]))


def test_sampler_records_no_sample_that_vllm_discards(vllm: RemoteEngine) -> None:
    """A pass over a piece of the known tokens, after a preemption, can end within the response: its set must stay."""
    assert vllm.call(_rows_to_record, [False] * 3) == ([0, 1, 3], ["a", "a", "c"], [7, 8, 3])
    assert vllm.call(_rows_to_record, [True, False, False]) == ([3], ["c"], [3])
    assert vllm.call(_rows_to_record, [False, False, True]) == ([0, 1], ["a", "a"], [7, 8])


def _recorded_requests(engine: Any) -> int:
    from mcore_rl.engines.vllm import sampler

    return len(sampler._recorder._runs)


def test_engine_forgets_sets_of_ended_requests(vllm: RemoteEngine, done: dict[str, Completion]) -> None:
    assert done
    requests = make_requests()
    vllm.call("submit", requests)
    for _ in range(6):
        vllm.call("step")
    assert vllm.call(_recorded_requests) > 0
    vllm.call("abort", [request.request_id for request in requests])
    assert vllm.call(_recorded_requests) == 0
