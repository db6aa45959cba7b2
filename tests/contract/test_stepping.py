"""Contract of every Engine between two steps: submit, abort, resume, and update weights under running requests."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.errors import DataError
from mcore_rl.rollout.loop import EngineLoop
from mcore_rl.rollout.trajectories import version_spans
from mcore_rl.types import Completion, Delta, GenerationRequest, SamplingOptions
from tests.contract.engines import RemoteEngine, one_character_per_token
from tests.contract.hf_trainer import HFTrainer
from tests.tiny_models import VOCABULARY

TOKENS = 24
SWAPS = 10
CLOSE = 1e-4
"""Tolerance of float32 log-probabilities with another order of sums; a wrong version differs by more than 0.1."""


def make_requests(num: int = 8, *, tokens: int = TOKENS, first_seed: int = 0) -> list[GenerationRequest]:
    """Create two requests for each of several prompts of different lengths."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, VOCABULARY, size=20 + p).astype(np.int32) for p in range(num // 2)]
    return [
        GenerationRequest(f"{p}.{s}", prompt, first_seed + 10 * p + s, SamplingOptions(tokens))
        for p, prompt in enumerate(prompts)
        for s in range(2)
    ]


def resume(requests: Sequence[GenerationRequest], partial: Sequence[Completion]) -> list[GenerationRequest]:
    by_id = {completion.request_id: completion for completion in partial}
    return [replace(each, partial=by_id[each.request_id]) for each in requests if each.request_id in by_id]


def steps(engine: Any, count: int) -> tuple[list[Delta], list[Completion]]:
    """Run `count` steps inside the engine's process; -1: until no request is running."""
    deltas, completions = [], []
    while engine.num_running and count:
        more, ended = engine.step()
        deltas += more
        completions += ended
        count -= 1
    return deltas, completions


def finish(engine: RemoteEngine) -> list[Completion]:
    return engine.call(steps, -1)[1]


def assert_same(engine: RemoteEngine, first: Completion, second: Completion) -> None:
    assert first.token_ids.tolist() == second.token_ids.tolist()
    np.testing.assert_allclose(first.logp, second.logp, rtol=0, atol=engine.logp_tolerance)
    assert first.finish_reason == second.finish_reason
    np.testing.assert_array_equal(first.routed_experts, second.routed_experts)


@pytest.fixture(scope="module")
def undisturbed(engine: RemoteEngine) -> dict[str, Completion]:
    """Responses to make_requests, generated without interruption."""
    return engine.generate(make_requests())


def test_step_deltas_add_up_to_completions(engine: RemoteEngine, undisturbed: dict[str, Completion]) -> None:
    engine.call("submit", make_requests())
    deltas, completions = engine.call(steps, -1)
    assert len(completions) == len(undisturbed)
    for completion in completions:
        own = [delta for delta in deltas if delta.request_id == completion.request_id]
        assert [token for delta in own for token in delta.token_ids] == completion.token_ids.tolist()
        np.testing.assert_array_equal(np.float32([p for delta in own for p in delta.logp]), completion.logp)
        assert {delta.version for delta in own} == {engine.weight_version}
        assert_same(engine, completion, undisturbed[completion.request_id])


def steps_of_four(engine: Any) -> tuple[list[Delta], list[Completion]]:
    """Run up to four steps per call inside the engine's process, until no request is running."""
    deltas, completions = [], []
    while engine.num_running:
        more, ended = engine.step(4)
        deltas += more
        completions += ended
    return deltas, completions


def test_step_with_limit_returns_the_tokens_and_experts_of_single_steps(
    engine: RemoteEngine, undisturbed: dict[str, Completion]
) -> None:
    """Requests end one after the other, and each ends its call: SGLang forgets their experts in the next step."""
    lengths = {request.request_id: TOKENS - i for i, request in enumerate(make_requests())}
    requests = [
        replace(each, sampling=replace(each.sampling, max_response_tokens=lengths[each.request_id]))
        for each in make_requests()
    ]
    engine.call("submit", requests)
    deltas, completions = engine.call(steps_of_four)
    assert len(completions) == len(requests)
    for completion in completions:
        name, expected = completion.request_id, undisturbed[completion.request_id]
        assert completion.token_ids.tolist() == expected.token_ids[: lengths[name]].tolist()
        assert completion.routed_experts is not None
        assert expected.routed_experts is not None
        rows = len(completion.routed_experts)
        np.testing.assert_array_equal(completion.routed_experts, expected.routed_experts[:rows])
    most = max(len(delta.token_ids) for delta in deltas)
    if engine.settings["rollout_config"].draft == "none":
        assert most == (4 if engine.kind == "sglang" else 1)
    else:
        assert most > 1


def test_submit_while_others_run_changes_no_response(engine: RemoteEngine, undisturbed: dict[str, Completion]) -> None:
    requests, completions = make_requests(), []
    for request in reversed(requests):
        engine.call("submit", [request])
        completions += engine.call(steps, 2)[1]
    completions += finish(engine)
    assert len(completions) == len(requests)
    for completion in completions:
        assert_same(engine, completion, undisturbed[completion.request_id])


@pytest.mark.parametrize("pauses", [(5,), (3, 9), (1, 1, 1)])
def test_abort_and_resume_gives_same_responses(
    engine: RemoteEngine, undisturbed: dict[str, Completion], pauses: tuple[int, ...]
) -> None:
    requests = make_requests()
    left, completions = requests, []
    for count in pauses:
        engine.call("submit", left)
        completions += engine.call(steps, count)[1]
        partial = engine.call("abort", [each.request_id for each in left])
        assert {each.finish_reason for each in partial} <= {"abort"}
        assert engine.call("num_running") == 0
        left = resume(requests, partial)[::-1]
    assert any(each.partial is not None and len(each.partial.token_ids) for each in left)
    for request in left:  # each alone
        engine.call("submit", [request])
        completions += finish(engine)
    assert sorted(each.request_id for each in completions) == sorted(undisturbed)
    for completion in completions:
        assert_same(engine, completion, undisturbed[completion.request_id])


def through_loop(engine: Any, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """Generate through an EngineLoop, inside the engine's process."""
    loop, completions = EngineLoop(engine), list[Completion]()

    def generate() -> None:
        try:
            loop.generate(requests, completions.append)
        finally:
            loop.stop()

    thread = threading.Thread(target=generate)
    thread.start()
    loop.serve()
    thread.join()
    return completions


def test_loop_tokens_per_version_gives_same_responses(engine: RemoteEngine, undisturbed: dict[str, Completion]) -> None:
    limits = [1, 5, None, 7]
    requests = [replace(each, tokens_per_version=limits[i % 4]) for i, each in enumerate(make_requests())]
    completions = engine.call(through_loop, requests)
    assert sorted(each.request_id for each in completions) == sorted(undisturbed)
    for completion in completions:
        assert_same(engine, completion, undisturbed[completion.request_id])


def with_stop(request: GenerationRequest, *stops: str) -> GenerationRequest:
    return replace(request, sampling=replace(request.sampling, stop=stops))


def middle(completion: Completion) -> str:
    """Return the text of three tokens in the middle of the response."""
    return one_character_per_token(completion.token_ids[7:10].tolist())


def test_stop_string_ends_response_with_completing_token(
    engine: RemoteEngine, undisturbed: dict[str, Completion]
) -> None:
    """The response equals the beginning of the one without a stop string, and other responses continue."""
    requests = make_requests()
    long = [each for each in requests if len(undisturbed[each.request_id].token_ids) == TOKENS]
    stopped = {each.request_id: middle(undisturbed[each.request_id]) for each in long[::2]}
    assert len(stopped) > 1
    given = [with_stop(each, "never", stopped.get(each.request_id, "none")) for each in requests]
    engine.call("submit", given)
    deltas, completions = engine.call(steps, -1)
    assert len(completions) == len(requests)
    for completion in completions:
        before, stop = undisturbed[completion.request_id], stopped.get(completion.request_id)
        if stop is None:
            assert_same(engine, completion, before)
            continue
        count = one_character_per_token(before.token_ids.tolist()).index(stop) + len(stop)
        assert completion.token_ids.tolist() == before.token_ids[:count].tolist()
        assert completion.finish_reason == "stop"
        np.testing.assert_allclose(completion.logp, before.logp[:count], rtol=0, atol=engine.logp_tolerance)
        prompt = next(len(each.token_ids) for each in requests if each.request_id == completion.request_id)
        np.testing.assert_array_equal(completion.routed_experts, before.routed_experts[: prompt + count - 1])
        own = [token for delta in deltas if delta.request_id == completion.request_id for token in delta.token_ids]
        assert own == completion.token_ids.tolist()


@pytest.mark.parametrize("pauses", [(8,), (9, 1), (1,) * 12])
def test_stop_string_across_interruptions_is_found(
    engine: RemoteEngine, undisturbed: dict[str, Completion], pauses: tuple[int, ...]
) -> None:
    request = next(each for each in make_requests() if len(undisturbed[each.request_id].token_ids) == TOKENS)
    before = undisturbed[request.request_id]
    request = with_stop(request, middle(before))
    left, completions = [request], []
    for count in pauses:
        engine.call("submit", left)
        completions += engine.call(steps, count)[1]
        left = resume(left, engine.call("abort", [request.request_id]))
        if not left:
            break
    if left:
        engine.call("submit", left)
        completions += finish(engine)
    (completion,) = completions
    stop = middle(before)
    count = one_character_per_token(before.token_ids.tolist()).index(stop) + len(stop)
    assert (completion.token_ids.tolist(), completion.finish_reason) == (before.token_ids[:count].tolist(), "stop")


def test_resume_keeps_temperatures_of_earlier_tokens(engine: RemoteEngine, undisturbed: dict[str, Completion]) -> None:
    request = next(each for each in make_requests() if len(undisturbed[each.request_id].token_ids) == TOKENS)
    partial = undisturbed[request.request_id]
    cut = replace(
        partial,
        token_ids=partial.token_ids[:5],
        logp=partial.logp[:5],
        versions=partial.versions[:5],
        routed_experts=partial.routed_experts[: len(request.token_ids) + 4],
        temperatures=np.full(5, 0.5, np.float32),
    )
    engine.call("submit", [replace(request, partial=cut, sampling=replace(request.sampling, temperature=2.0))])
    (completion,) = finish(engine)
    assert completion.temperatures is not None
    assert completion.temperatures.tolist() == [0.5] * 5 + [2.0] * (len(completion.token_ids) - 5)


def test_abort_ignores_finished_and_unknown_requests(engine: RemoteEngine) -> None:
    first, second = make_requests(2, tokens=2)
    engine.call("submit", [first])
    finish(engine)
    engine.call("submit", [second])
    (aborted,) = engine.call("abort", ["nobody", first.request_id, second.request_id])
    assert (aborted.request_id, aborted.finish_reason, len(aborted.token_ids)) == (second.request_id, "abort", 0)


def test_submit_complete_partial_or_missing_experts_raises(
    engine: RemoteEngine, undisturbed: dict[str, Completion]
) -> None:
    request = next(each for each in make_requests() if len(undisturbed[each.request_id].token_ids) == TOKENS)
    with pytest.raises(DataError, match=f"already has {TOKENS} of {TOKENS} tokens"):
        engine.call("submit", [replace(request, partial=undisturbed[request.request_id])])
    engine.call("submit", [request])
    engine.call(steps, 4)
    (aborted,) = engine.call("abort", [request.request_id])
    with pytest.raises(DataError, match="without the experts"):
        engine.call("submit", [replace(request, partial=replace(aborted, routed_experts=None))])
    assert engine.call("num_running") == 0


def test_submit_duplicate_running_id_raises_and_ids_are_reusable(engine: RemoteEngine) -> None:
    requests = make_requests(2, tokens=3)
    engine.call("submit", requests[:1])
    with pytest.raises(ValueError, match="must differ"):
        engine.call("submit", requests)
    assert engine.call("num_running") == 1
    with pytest.raises(RuntimeError, match="1 requests are running"):
        engine.generate(requests[1:])
    finish(engine)
    engine.call("submit", requests)
    assert len(finish(engine)) == 2


def publish_update(trainer: HFTrainer, version: int, recompute: bool) -> None:
    with trainer.sending():
        trainer._engine.call("begin_update")
        trainer.receive(range(trainer.plan.num_rounds))
        trainer._engine.call(partial(_finish_update, version=version, recompute=recompute))


def _finish_update(engine: Any, version: int, recompute: bool) -> None:
    engine.finish_update(version, recompute=recompute)


@torch.no_grad()
def logp_with_kept_cache(
    models: dict[int, Any], spans: list[list[int]], request: GenerationRequest, ids: list[int]
) -> np.ndarray:
    """Compute log-probabilities with transformers if running requests keep their KV cache on an update.

    spans: [version, start, end) of the response's tokens. Each model reads the keys and values that earlier models left
    in the cache. The pass that samples a token reads the token before it.
    """
    tokens, cache, found, read = [*request.token_ids.tolist(), *ids], None, [], 0
    for version, start, end in spans:
        stop = len(request.token_ids) + end - 1
        out = models[version](torch.tensor([tokens[read:stop]]), past_key_values=cache, use_cache=True)
        cache, read = out.past_key_values, stop
        found.append(out.logits[0, start - end :].double().log_softmax(-1))
    return torch.cat(found).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()


@torch.no_grad()
def logp_recomputed(
    models: dict[int, Any], spans: list[list[int]], request: GenerationRequest, ids: list[int]
) -> np.ndarray:
    """Compute log-probabilities with transformers if every model computes the whole KV cache again."""
    tokens, found = torch.tensor([[*request.token_ids.tolist(), *ids]]), np.empty(len(ids))
    for version, start, end in spans:
        logits = models[version](tokens).logits[0, len(request.token_ids) - 1 : -1].double().log_softmax(-1)
        found[start:end] = logits.gather(1, torch.tensor(ids)[:, None])[start:end, 0]
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_update_while_running_tokens_have_exact_versions(engine: RemoteEngine, model: Any, recompute: bool) -> None:
    check_versions(engine, model, recompute)


def check_versions(engine: RemoteEngine, model: Any, recompute: bool) -> None:
    """Update several times while requests are running, and compare the log-probabilities with the versions' models."""
    trainer = HFTrainer(copy.deepcopy(model), engine, 1 << 20, 2)
    base = engine.weight_version + 1
    models, requests, completions = {}, make_requests(), []
    publish_update(trainer, base, recompute)
    models[base] = copy.deepcopy(trainer.model)
    engine.call("submit", requests)
    # The same prompts again, submitted before the last update: they must not reuse KV cache of earlier weights.
    late = [replace(each, request_id=f"late {each.request_id}", seed=each.seed + 500) for each in requests]
    last = base + SWAPS
    for version in range(base + 1, last + 1):
        completions += engine.call(steps, 2)[1]
        engine.call("submit", late if version == last else [])
        trainer.perturb(version)
        models[version] = copy.deepcopy(trainer.model)
        publish_update(trainer, version, recompute)
    completions += finish(engine)
    by_id = {each.request_id: each for each in [*requests, *late]}
    mixed = [each for each in completions if len(set(each.versions.tolist())) > SWAPS // 3]
    assert len(mixed) >= 2
    right, wrong = (logp_recomputed, logp_with_kept_cache) if recompute else (logp_with_kept_cache, logp_recomputed)
    for completion in completions:
        spans, ids = version_spans(completion.versions), completion.token_ids.tolist()
        request = by_id[completion.request_id]
        np.testing.assert_allclose(completion.logp, right(models, spans, request, ids), atol=CLOSE)
        assert not request.request_id.startswith("late") or set(completion.versions.tolist()) == {last}
    furthest = max(
        np.abs(each.logp - wrong(models, version_spans(each.versions), by_id[each.request_id], each.token_ids.tolist()))
        .max()
        for each in mixed
    )  # fmt: skip
    assert furthest > 0.1


def test_resume_after_update_keeps_experts_of_earlier_tokens(engine: RemoteEngine, model: Any) -> None:
    """Earlier tokens keep the experts of the pass that sampled them."""
    trainer = HFTrainer(copy.deepcopy(model), engine, 1 << 20, 2)
    version = engine.weight_version + 1
    publish_update(trainer, version, False)
    models, requests = {version: copy.deepcopy(trainer.model)}, make_requests()
    engine.call("submit", requests)
    completions = engine.call(steps, 9)[1]
    aborted = engine.call("abort", [each.request_id for each in requests])
    trainer.perturb(2)
    models[version + 1] = trainer.model
    publish_update(trainer, version + 1, False)
    left = resume(requests, aborted)
    engine.call("submit", left)
    completions += finish(engine)
    before, by_id = {each.request_id: each for each in aborted}, {each.request_id: each for each in requests}
    assert len(completions) == len(requests)
    for completion in completions:
        request, ids = by_id[completion.request_id], completion.token_ids.tolist()
        expected = logp_recomputed(models, version_spans(completion.versions), request, ids)
        np.testing.assert_allclose(completion.logp, expected, atol=CLOSE)
        assert completion.routed_experts is not None
        assert len(completion.routed_experts) == len(request.token_ids) + len(ids) - 1
        if completion.request_id in before:
            kept = before[completion.request_id].routed_experts
            assert kept is not None
            np.testing.assert_array_equal(completion.routed_experts[: len(kept)], kept)
