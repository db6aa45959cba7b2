"""SGLang with attention data parallelism: two ranks with different requests, with and without the overlap schedule.

With MCORE_RL_EVERY_TEST=1, test_stepping.py and test_rollout_engine.py run their cases on such engines, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.engines.noise import noise_keys, sample_tokens
from mcore_rl.errors import WeightSyncError
from mcore_rl.types import Completion, GenerationRequest, SamplingOptions
from tests.contract.engines import ATTENTION_DP, WITH_SGLANG, RemoteEngine, start_engine
from tests.contract.hf_trainer import HFTrainer
from tests.contract.test_rollout_engine import check_routing, reference_logits
from tests.contract.test_sglang_layouts import MODELS
from tests.contract.update_checks import TINY_BUCKET, check_greedy
from tests.tiny_models import VOCABULARY, tiny_model

pytestmark = WITH_SGLANG
TOKENS, NUM_CANDIDATES = 20, 20
DEADLINE_SECONDS = 60
"""Time limit of a call: a rank that waits for another rank in a batch ends it."""


class Engine:
    """An engine with the weights of `model`, six requests, and their undisturbed responses of TOKENS tokens."""

    def __init__(self, remote: RemoteEngine, trainer: HFTrainer) -> None:
        self.remote, self.trainer, self.model = remote, trainer, trainer.model
        self.in_flight = int(remote.settings["rollout_config"].overlap_schedule)
        """Number of batches in flight between two steps."""
        remote.call(_set_deadline, DEADLINE_SECONDS)
        trainer.publish(1)
        candidates = make_requests()
        self.responses = self.generate(candidates)
        self.requests = [each for each in candidates if len(self.responses[each.request_id].token_ids) == TOKENS][:6]
        self.ids = [request.request_id for request in self.requests]
        assert len(self.ids) == 6

    def generate(self, requests: list[GenerationRequest]) -> dict[str, Completion]:
        self.remote.call("submit", requests)
        return {completion.request_id: completion for completion in self.finish()}

    def step(self, limit: int = 1) -> tuple[dict[str, int], list[Completion]]:
        """Return the number of new tokens by request, and the completions."""
        deltas, completions = self.remote.call("step", limit)
        return {delta.request_id: len(delta.token_ids) for delta in deltas}, completions

    def finish(self) -> list[Completion]:
        """Run calls of four steps, until all requests must have ended."""
        completions = []
        for _ in range(NUM_CANDIDATES * TOKENS):
            completions += self.step(4)[1]
        assert self.remote.call("num_running") == 0
        return completions

    def check(self, completions: list[Completion]) -> None:
        """Require the undisturbed responses."""
        for completion in completions:
            expected = self.responses[completion.request_id]
            assert completion.token_ids.tolist() == expected.token_ids.tolist()
            np.testing.assert_allclose(completion.logp, expected.logp, rtol=0, atol=self.remote.logp_tolerance)
            np.testing.assert_array_equal(completion.routed_experts, expected.routed_experts)


def make_requests() -> list[GenerationRequest]:
    """Create requests with different prompts. Idle ranks get such requests in turn."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, VOCABULARY, size=6 + i).astype(np.int32) for i in range(NUM_CANDIDATES)]
    return [GenerationRequest(str(i), prompt, i, SamplingOptions(TOKENS)) for i, prompt in enumerate(prompts)]


def _set_deadline(engine: Any, seconds: float) -> None:
    engine._ranks.timeout_seconds = seconds


def requests_by_rank(engine: Any) -> list[int]:
    counts: list[int] = engine._request_ranks._counts
    return counts


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("deepseek_v3", False), id="deepseek_v3"),
        # test_overlap.py tests the schedule.
        pytest.param(("qwen3_moe", True), id="qwen3_moe-overlap_schedule", marks=pytest.mark.on_demand),
    ],
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory = tmp_path_factory.mktemp("model")
    name, overlap = request.param
    _, known, fields = MODELS[name]
    tiny_model(known, seed=0, **fields).save_pretrained(directory)
    keys = {**ATTENTION_DP, "overlap_schedule": overlap}
    remote = start_engine("sglang", directory, load_weights=False, capture_routing=True, **keys)
    try:
        yield Engine(remote, HFTrainer(tiny_model(known, seed=1, **fields).eval(), remote, TINY_BUCKET, 2))
    finally:
        remote.shutdown()


def test_generate_samples_equal_noise_on_transformers(engine: Engine) -> None:
    """The oracle knows no ranks, so the tokens are equal to those of a single rank."""
    for request in make_requests():  # some end early
        done = engine.responses[request.request_id]
        probabilities = reference_logits(engine.model, request, done).softmax(-1)
        positions = len(request.token_ids) + np.arange(len(done.token_ids))
        expected = sample_tokens(probabilities, noise_keys([request.seed] * len(positions), positions))
        assert done.token_ids.tolist() == expected.tolist()
        logp = probabilities.log().gather(1, torch.from_numpy(done.token_ids.astype(np.int64))[:, None])[:, 0]
        np.testing.assert_allclose(done.logp, logp, atol=1e-4)


def test_generate_routed_experts_come_from_both_ranks(engine: Engine) -> None:
    requests = make_requests()
    layers, experts = (4, 2) if engine.model.config.model_type == "qwen3_moe" else (3, 4)
    for request in requests:
        done = engine.responses[request.request_id]
        assert done.routed_experts is not None
        assert done.routed_experts.shape == (len(request.token_ids) + len(done.token_ids) - 1, layers, experts)
    if engine.model.config.model_type == "qwen3_moe":
        assert check_routing(engine.model, requests, engine.responses) > 100


def test_step_call_ends_one_batch_after_a_request_of_one_rank(engine: Engine) -> None:
    """Both ranks end the call there, although rank 1 has finished no request."""
    first, second = engine.requests[:2]
    first = replace(first, sampling=SamplingOptions(3))
    engine.remote.call("submit", [first, second])
    assert engine.remote.call(requests_by_rank) == [1, 1]
    tokens, completions = engine.step(16)
    assert tokens == {first.request_id: 3, second.request_id: 4}
    assert [completion.request_id for completion in completions] == [first.request_id]
    assert completions[0].routed_experts is not None
    assert engine.step(5)[0] == {second.request_id: 5}
    engine.check(engine.finish())


def test_abort_all_requests_of_a_rank_leaves_it_idle(engine: Engine) -> None:
    """The idle rank takes part in each step, and afterwards gets new requests first."""
    requests = engine.requests
    engine.remote.call("submit", requests)
    engine.step(5)
    partial = engine.remote.call("abort", engine.ids[1::2])
    assert engine.remote.call(requests_by_rank) == [3, 0]
    engine.step(4)
    assert [len(each.token_ids) for each in partial] == [5, 5, 5]
    left = [replace(request, partial=each) for request, each in zip(requests[1::2], partial, strict=True)]
    # Two of them continue on the idle rank, and the last one on rank 0 after its requests have finished.
    engine.remote.call("submit", left[:2])
    assert engine.remote.call(requests_by_rank) == [3, 2]
    completions = engine.finish()
    engine.remote.call("submit", left[2:])
    assert engine.remote.call(requests_by_rank) == [1, 0]
    completions += engine.finish()
    assert sorted(completion.request_id for completion in completions) == sorted(engine.ids)
    engine.check(completions)


def _sleep_and_wake_up(engine: Any) -> int:
    released = engine.sleep(keep_weights=True)
    for part in ("weights", "kv_cache"):
        engine.wake_up(part)
    return released


def test_sleep_after_abort_releases_the_caches_of_both_ranks(engine: Engine) -> None:
    engine.remote.call("submit", engine.requests)
    engine.step(2)
    engine.remote.call("abort", engine.ids)
    assert engine.remote.call(_sleep_and_wake_up) > 2 * 0.9 * 0.03 * 2**30
    engine.check(list(engine.generate(engine.requests).values()))


def test_update_while_a_request_ends_drains_both_ranks(engine: Engine) -> None:
    """With the overlap schedule, the batch in flight ends a request of each rank. One of them is aborted before the
    next step returns the results of this batch."""
    requests, (first, second) = engine.requests, engine.ids[:2]
    prompts = {request.request_id: request.token_ids for request in requests}
    short = [replace(each, sampling=SamplingOptions(6)) for each in requests[:2]]
    engine.remote.call("submit", [*short, *requests[2:]])
    engine.step(5)
    engine.trainer.publish(1)  # the same weights
    left = 3 - engine.in_flight
    assert engine.remote.call(requests_by_rank) == [left, left]
    (partial,) = engine.remote.call("abort", [second])
    assert engine.remote.call(requests_by_rank) == [left, 2]
    tokens, completions = engine.step()
    assert tokens == dict.fromkeys([first, *engine.ids[2:]], 1)
    for completion, count in ((partial, 5), (completions[0], 6)):
        expected = engine.responses[completion.request_id]
        rows = len(prompts[completion.request_id]) + count - 1
        assert completion.token_ids.tolist() == expected.token_ids[:count].tolist()
        np.testing.assert_array_equal(completion.routed_experts, expected.routed_experts[:rows])
    engine.remote.call("submit", [replace(requests[1], partial=partial)])
    completions = engine.finish()
    assert sorted(completion.request_id for completion in completions) == sorted(engine.ids[1:])
    engine.check(completions)


def test_update_between_steps_is_exact_and_certified_on_both_ranks(engine: Engine) -> None:
    """Must be the last test of an engine: it changes the weights."""
    trainer = engine.trainer
    trainer.perturb(3)
    engine.remote.call("submit", engine.requests)
    engine.step(5)
    trainer.publish(2)
    trainer.overwrite_buffers()
    old = 5 + engine.in_flight
    for completion in engine.finish():
        assert completion.versions.tolist() == [1] * old + [2] * (len(completion.token_ids) - old)
    check_greedy(engine.remote, engine.model, 2)
    assert trainer.certify() > 100
    trainer.perturb(4)
    with pytest.raises(WeightSyncError, match="differ"):
        trainer.certify()
