"""SGLang's overlap schedule changes no token: comparison with an engine that runs one batch after the other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mcore_rl.types import Completion, GenerationRequest, SamplingOptions
from tests.contract.engines import PASS_TOKENS, WITH_SGLANG, RemoteEngine
from tests.contract.hf_trainer import HFTrainer
from tests.contract.test_stepping import assert_same, check_versions, finish, make_requests, resume, steps, with_stop
from tests.tiny_models import VOCABULARY

pytestmark = WITH_SGLANG
CACHE_TOKENS = 512
"""Enough for the 8 requests of make_requests. SGLang starts more long requests than fit, because it expects shorter
responses, and retracts three of them later."""


@pytest.fixture(scope="module")
def engines(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RemoteEngine]]:
    """An engine without overlap and one with."""
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    config = model.config
    width = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    settings = {"max_batched_tokens": PASS_TOKENS, "kv_cache_gib": (CACHE_TOKENS + 0.5) * width * 4 / 2**30}

    def start(overlap: bool) -> RemoteEngine:
        engine = RemoteEngine("sglang")
        return engine.start(directory, capture_routing=True, overlap_schedule=overlap, **settings)

    with ThreadPoolExecutor(2) as pool:
        started = list(pool.map(start, (False, True)))
    yield started
    for engine in started:
        engine.shutdown()


@pytest.fixture
def overlapped(engines: list[RemoteEngine]) -> RemoteEngine:
    return engines[1]


def many(*, long: bool = False) -> list[GenerationRequest]:
    """Return requests with every way of sampling, of different lengths or all `long`; these have other prompts."""
    rng = np.random.default_rng(2 + long)
    options = ({}, {"temperature": 0.0}, {"top_p": 0.8}, {"min_p": 0.05}, {"repetition_penalty": 1.3}, {"top_k": 9})
    requests = []
    for number in range(24):
        prompt = rng.integers(2, VOCABULARY, size=8 + number).astype(np.int32)
        tokens = 32 if long else 1 + 31 * (number % 8) // 7
        sampling = SamplingOptions(tokens, **options[number % len(options)])
        requests.append(GenerationRequest(str(number), prompt, number, sampling))
    return requests


def run(engine: Any, requests: list[GenerationRequest], limit: int) -> list[Completion]:
    """Run up to `limit` steps per call, and check that the steps' tokens add up. Runs in the engine's process."""
    engine.submit(requests)
    completions, found = [], dict[str, list[int]]()
    while engine.num_running:
        deltas, ended = engine.step(limit)
        for delta in deltas:
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
        completions += ended
    assert all(found[each.request_id] == each.token_ids.tolist() for each in completions)
    return completions


def run_without_end_token(engine: Any, requests: list[GenerationRequest], limit: int) -> list[Completion]:
    # A token that no request samples: if requests have none, SGLang starts only as many as fit.
    settings, engine._settings = engine._settings, replace(engine._settings, eos_token_ids=(VOCABULARY,))
    try:
        return run(engine, requests, limit)
    finally:
        engine._settings = settings


def assert_equal(
    engines: list[RemoteEngine], requests: list[GenerationRequest], limit: int, run: Any = run
) -> dict[str, Completion]:
    """Require equal responses of both engines. Returns them by id."""
    plain, overlapped = ({each.request_id: each for each in engine.call(run, requests, limit)} for engine in engines)
    assert plain.keys() == overlapped.keys() == {each.request_id for each in requests}
    for name, completion in plain.items():
        assert_same(engines[0], overlapped[name], completion)
    return plain


@pytest.mark.parametrize("limit", [1, 4])
def test_overlap_requests_of_different_lengths_are_equal(engines: list[RemoteEngine], limit: int) -> None:
    completions = assert_equal(engines, many(), limit)
    assert {each.finish_reason for each in completions.values()} == {"stop", "length"}


def test_overlap_retracted_requests_are_equal(engines: list[RemoteEngine]) -> None:
    requests = [each for each in many(long=True) if each.sampling.repetition_penalty == 1]
    completions = assert_equal(engines, requests, 4, run_without_end_token)
    assert {len(each.token_ids) for each in completions.values()} == {32}


def test_overlap_stop_strings_and_end_tokens_are_equal(engines: list[RemoteEngine]) -> None:
    requests = make_requests()
    stops = [chr(ord("0") + token_id) for token_id in range(2, VOCABULARY, 9)]
    stopped = [with_stop(each, *stops) if i % 2 else each for i, each in enumerate(requests)]
    completions = assert_equal(engines, stopped, 4)
    assert sum(each.finish_reason == "stop" for each in completions.values()) > 2


def test_overlap_first_step_returns_the_first_tokens(overlapped: RemoteEngine) -> None:
    """It launches two batches, of which the second is in flight at its end."""
    overlapped.call("submit", make_requests(2))
    deltas = overlapped.call(steps, 1)[0]
    assert [len(delta.token_ids) for delta in deltas] == [1, 1]
    overlapped.call("abort", overlapped.call("running_ids"))


def test_overlap_abort_and_sleep_leave_equal_responses(engines: list[RemoteEngine]) -> None:
    """A batch is in flight at the abort and when the engine goes to sleep."""
    plain, overlapped = engines
    requests = make_requests()
    expected = plain.generate(requests)
    overlapped.call("submit", requests)
    completions = overlapped.call(steps, 5)[1]
    partial = overlapped.call("abort", [each.request_id for each in requests])
    overlapped.call(sleep_and_wake)
    overlapped.call("submit", resume(requests, partial))
    assert {each.version for each in overlapped.call(steps, 1)[0]} == {overlapped.weight_version}
    completions += finish(overlapped)
    assert len(completions) == len(requests)
    for completion in completions:
        assert_same(plain, completion, expected[completion.request_id])


def sleep_and_wake(engine: Any) -> None:
    assert engine.sleep(keep_weights=True) > 0
    engine.wake_up("weights")
    engine.wake_up("kv_cache")


@pytest.mark.parametrize("recompute", [False, True])
def test_overlap_update_while_running_versions_are_exact(overlapped: RemoteEngine, model: Any, recompute: bool) -> None:
    check_versions(overlapped, model, recompute)


def test_overlap_update_keeps_first_tokens_in_flight(overlapped: RemoteEngine, model: Any) -> None:
    """The first pass contains a part of the second prompt, and the pass in flight the rest. If its token were dropped,
    frequent updates would keep the request from starting."""
    trainer = HFTrainer(copy.deepcopy(model), overlapped, 1 << 20, 2)
    before, requests = overlapped.weight_version, make_requests(4)[::2]
    assert len(requests[0].token_ids) < PASS_TOKENS < sum(len(each.token_ids) for each in requests)
    overlapped.call("submit", requests)
    assert [delta.request_id for delta in overlapped.call(steps, 1)[0]] == ["0.0"]
    trainer.publish(before + 1)
    assert {(each.request_id, each.version) for each in overlapped.call(steps, 1)[0]} == {("1.0", before)}
    for completion in finish(overlapped):
        assert completion.versions.tolist() == [before] + [before + 1] * (len(completion.token_ids) - 1)


def test_overlap_abort_after_update_keeps_the_reported_tokens(overlapped: RemoteEngine, model: Any) -> None:
    """The tokens in flight at the update are dropped; their experts are not mistaken for those of reported tokens."""
    trainer = HFTrainer(copy.deepcopy(model), overlapped, 1 << 20, 2)
    before, requests = overlapped.weight_version, make_requests()
    overlapped.call("submit", requests)
    deltas, ended = overlapped.call(steps, 9)
    trainer.publish(before + 1)
    reported = {each.request_id: 0 for each in requests}
    for delta in deltas:
        reported[delta.request_id] += len(delta.token_ids)
    partial = overlapped.call("abort", [each.request_id for each in requests])
    assert len(partial) + len(ended) == len(requests)
    assert any(reported[each.request_id] > 2 for each in partial)
    prompts = {each.request_id: len(each.token_ids) for each in requests}
    for each in partial:
        assert each.versions.tolist() == [before] * reported[each.request_id]
        assert not len(each.token_ids) or len(each.routed_experts) == prompts[each.request_id] + len(each.token_ids) - 1
    overlapped.call("submit", requests[:1])
    assert {(each.request_id, each.version) for each in overlapped.call(steps, -1)[0]} == {("0.0", before + 1)}
