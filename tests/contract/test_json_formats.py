"""Formats of responses on the real vLLM engine: conformity, recorded sets, and log-probabilities of transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.errors import DataError
from mcore_rl.megatron.step.kept_tokens import KeptTokens
from mcore_rl.megatron.step.logprobs import linear_logp_entropy
from mcore_rl.types import Completion, GenerationRequest, JsonFormat, SamplingOptions, TokenSets
from tests.byte_tokenizer import EOS, byte_tokenizer
from tests.contract.engines import ON_DEMAND, RemoteEngine, start_engine
from tests.contract.format_schemas import SCHEMAS, AllowedTokens, conforms, form_of
from tests.contract.format_session import FormatSession, play, play_thinking, play_unrecorded
from tests.contract.hf_trainer import HFTrainer
from tests.contract.test_stepping import finish, publish_update, resume, steps
from tests.tiny_models import tiny_model

VOCAB_SIZE, TOKENS, SAMPLES, PASS_TOKENS = 288, 64, 3, 64
LIMITS = {"max_prompt_tokens": 64, "max_response_tokens": TOKENS, "max_concurrent_requests": 48, "kv_cache_gib": 0.1}
TOLERANCE = 1e-4
"""float32 in the engine, with another order of sums; divided by a temperature of 0.7."""
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
    "min-p": {"min_p": 0.2, "top_k": 20},
}
TOKENIZER = byte_tokenizer()


def text_of(token_ids: Sequence[int]) -> str:
    """Decode a response without its end token."""
    return str(TOKENIZER.decode([token for token in token_ids if token != EOS], skip_special_tokens=False))


def make_requests() -> list[GenerationRequest]:
    """Create requests for each schema, sampled in several ways, and a request without a format between them."""
    rng, made = np.random.default_rng(7), []
    for number, name in enumerate(SCHEMAS):
        prompt = rng.integers(5, 200, size=9 + number).astype(np.int32)
        for way, options in WAYS.items():
            for sample in range(SAMPLES):
                sampling = SamplingOptions(TOKENS, keep_mask=True, format=form_of(name), **options)
                made.append(GenerationRequest(f"{name} {way} {sample}", prompt, 100 * number + sample, sampling))
        free = SamplingOptions(6, keep_mask=True)
        made.append(GenerationRequest(f"free {name} 0", prompt, number, free))
    return made


REQUESTS = {request.request_id: request for request in make_requests()}
FORMATTED = {name: request for name, request in REQUESTS.items() if request.sampling.format is not None}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3", seed=3, vocab_size=VOCAB_SIZE, head_dim=32, intermediate_size=64)


DRAFTS = {"draft": "ngram", "draft_tokens": 2, "draft_below": 8}
ENGINES = [pytest.param({}, id="plain"), pytest.param(DRAFTS, id="drafts", marks=ON_DEMAND)]


@pytest.fixture(scope="module", params=ENGINES)
def engine(
    request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RemoteEngine]:
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    settings = {**LIMITS, "keep_sampling_mask": True, "max_batched_tokens": PASS_TOKENS, **request.param}
    started = start_engine("vllm", directory, tokenizer=TOKENIZER, **settings)
    yield started
    started.shutdown()


@pytest.fixture(scope="module")
def done(engine: RemoteEngine) -> dict[str, Completion]:
    return engine.generate(list(REQUESTS.values()))


@pytest.fixture(scope="module")
def allowed() -> AllowedTokens:
    return AllowedTokens(TOKENIZER, VOCAB_SIZE)


def members(kept: TokenSets) -> np.ndarray:
    """Return the sets as bool [T, V]."""
    ids = np.arange(VOCAB_SIZE, dtype=np.int32)
    return np.stack([kept.contain(np.full(len(kept), token, np.int32)) for token in ids], 1)


def logp_of(models: dict[int, Any], request: GenerationRequest, completion: Completion, sets: np.ndarray) -> np.ndarray:
    """Compute the log-probabilities of a response with transformers in float64, each token with the model of its
    version, over `sets` only. Shapes: sets bool [T, V] -> [T]."""
    ids = torch.from_numpy(np.concatenate([request.token_ids, completion.token_ids]).astype(np.int64))
    first, mask = len(request.token_ids), torch.from_numpy(sets)
    found = np.zeros(len(completion.token_ids))
    for version, model in models.items():
        with torch.no_grad():
            logits = model(ids[None]).logits[0, first - 1 : -1].double() / request.sampling.temperature
        logp = logits.masked_fill(~mask, -torch.inf).log_softmax(-1).gather(1, ids[first:, None])[:, 0].numpy()
        found = np.where(completion.versions == version, logp, found)
    return found


def test_complete_responses_conform_to_their_schemas(done: dict[str, Completion]) -> None:
    complete = dict.fromkeys(SCHEMAS, 0)
    for name in FORMATTED:
        if done[name].finish_reason == "stop":
            schema = name.split()[0]
            assert done[name].token_ids[-1] == EOS
            assert conforms(schema, text_of(done[name].token_ids)), text_of(done[name].token_ids)
            complete[schema] += 1
    assert sum(complete.values()) > len(FORMATTED) / 2
    assert sum(count > 0 for count in complete.values()) >= len(SCHEMAS) - 2, complete


def test_recorded_sets_equal_those_computed_apart(done: dict[str, Completion], allowed: AllowedTokens) -> None:
    sizes = []
    for name, request in FORMATTED.items():
        completion, form = done[name], request.sampling.format
        assert completion.kept is not None
        assert form is not None
        expected, found = allowed.sets(form, tuple(completion.token_ids.tolist())), members(completion.kept)
        if " full " in name:
            np.testing.assert_array_equal(found, expected, err_msg=f"{name}: {text_of(completion.token_ids)!r}")
        else:
            assert not (found & ~expected).any()
        sizes += found.sum(1).tolist()
    assert min(sizes) == 1
    assert max(sizes) > 100


def test_logp_equals_that_of_transformers_over_the_sets(
    model: Any, done: dict[str, Completion], allowed: AllowedTokens
) -> None:
    furthest = 0.0
    for name, request in REQUESTS.items():
        completion, form = done[name], request.sampling.format
        assert completion.kept is not None
        sets = members(completion.kept)
        if form is not None and " full " in name:
            sets = allowed.sets(form, tuple(completion.token_ids.tolist()))
        np.testing.assert_allclose(completion.logp, logp_of({0: model}, request, completion, sets), atol=TOLERANCE)
        assert not completion.logp[sets.sum(1) == 1].any()
        # The control: over all tokens, the masked part is missing.
        whole = logp_of({0: model}, request, completion, np.ones_like(sets))
        furthest = max(furthest, float(np.abs(completion.logp - whole).max()))
    assert furthest > 1


def test_request_without_format_is_not_masked(done: dict[str, Completion]) -> None:
    for name, completion in done.items():
        if name not in FORMATTED:
            assert completion.kept is not None
            assert (completion.kept.sizes() == VOCAB_SIZE).all()


def test_truncated_response_begins_the_longer_one(engine: RemoteEngine, done: dict[str, Completion]) -> None:
    short = [replace(each, sampling=replace(each.sampling, max_response_tokens=5)) for each in FORMATTED.values()]
    for name, completion in engine.generate(short).items():
        assert completion.token_ids.tolist() == done[name].token_ids[:5].tolist()
        assert completion.finish_reason == ("length" if len(done[name].token_ids) > 5 else done[name].finish_reason)


def test_stop_string_ends_a_response_with_a_format(engine: RemoteEngine, done: dict[str, Completion]) -> None:
    requests = [each for name, each in FORMATTED.items() if name.startswith("person")]
    found = engine.generate([replace(each, sampling=replace(each.sampling, stop=(":",))) for each in requests])
    for name, completion in found.items():
        whole = text_of(done[name].token_ids)
        if ":" in whole:
            text = text_of(completion.token_ids)
            assert whole.startswith(text)
            assert text.count(":") == 1
            assert completion.finish_reason == "stop"


def test_aborted_responses_continue_in_their_format(engine: RemoteEngine, done: dict[str, Completion]) -> None:
    requests = list(FORMATTED.values())
    engine.call("submit", requests)
    ended = engine.call(steps, 9)[1]
    partial_responses = engine.call("abort", [request.request_id for request in requests])
    begun = [each for each in partial_responses if len(each.token_ids)]
    assert len(begun) > 10
    left = [request for request in requests if request.request_id in {each.request_id for each in partial_responses}]
    again = engine.generate(resume(left, partial_responses))
    for completion in [*ended, *again.values()]:
        whole = done[completion.request_id]
        assert completion.token_ids.tolist() == whole.token_ids.tolist()
        assert completion.kept is not None
        assert whole.kept is not None
        np.testing.assert_array_equal(completion.kept.words, whole.kept.words)
        np.testing.assert_allclose(completion.logp, whole.logp, atol=engine.logp_tolerance)


def test_partial_response_outside_its_format_is_refused(engine: RemoteEngine, done: dict[str, Completion]) -> None:
    name = next(name for name in FORMATTED if name.startswith("choice"))
    other = replace(FORMATTED[name].sampling, format=JsonFormat('{"type": "null"}'))
    part = replace(done[name], token_ids=done[name].token_ids[:1], logp=done[name].logp[:1])
    part = replace(part, versions=part.versions[:1], kept=TokenSets.of([part.token_ids]))
    with pytest.raises(DataError, match="leaves its format at token 0"):
        engine.generate([replace(FORMATTED[name], sampling=other, partial=part)])


def test_schema_that_cannot_be_compiled_is_refused(engine: RemoteEngine) -> None:
    with pytest.raises(DataError, match="the format cannot be compiled: Invalid range"):
        engine.call("prepare_format", JsonFormat('{"type": "integer", "minimum": 5, "maximum": 4}'))
    request = next(iter(FORMATTED.values()))
    wrong = replace(request.sampling, format=JsonFormat('{"type": "integer", "minimum": 5, "maximum": 4}'))
    with pytest.raises(DataError, match="cannot be compiled"):
        engine.generate([replace(request, sampling=wrong)])
    assert engine.call("num_running") == 0


def test_trainer_computes_logp_and_gradients_over_the_sets(model: Any, done: dict[str, Completion]) -> None:
    for name, request in FORMATTED.items():
        completion = done[name]
        assert completion.kept is not None
        ids = torch.from_numpy(np.concatenate([request.token_ids, completion.token_ids]).astype(np.int64))
        first = len(request.token_ids)
        with torch.no_grad():
            hidden = model.model(ids[None]).last_hidden_state[0, first - 1 : -1]
        hidden.requires_grad_()
        logp, entropy = linear_logp_entropy(
            *(hidden, model.lm_head.weight.detach(), ids[first:]),
            temperature=request.sampling.temperature,
            kept=KeptTokens.of(completion.kept, torch.from_numpy),
        )
        np.testing.assert_allclose(logp.detach().numpy(), completion.logp, atol=TOLERANCE)
        single = completion.kept.sizes() == 1
        assert not logp.detach().numpy()[single].any()
        assert not entropy.detach().numpy()[single].any()
        logp.sum().backward()
        assert hidden.grad is not None
        assert torch.isfinite(hidden.grad).all()
        assert not hidden.grad[torch.from_numpy(single)].any()


CHOICES = ('"é"', "12", '{"a":[true]}')
"""Replies of the schema `choice`, without white space."""


def compact(text: str) -> str:
    return "".join(text.split())


def test_client_of_openai_gets_replies_of_its_schema(engine: RemoteEngine, allowed: AllowedTokens) -> None:
    played: FormatSession = engine.call(play)
    for name in ("chat", "streamed", "completions", "responses"):
        for text, reason in zip(played.texts[name], played.reasons[name], strict=True):
            assert compact(text) in CHOICES if reason == "stop" else played.reasoning.get(name)
    assert len(played.texts["chat"]) == len(played.texts["streamed"]) == 4
    assert played.reasons["object"] == ["length"]
    assert {compact(text) for text in played.texts["stop"]} <= {'"é"', "12", '{"', ""}
    assert played.refusals["unique"][0] == played.refusals["range"][0] == 400
    assert "keyword `uniqueItems`" in played.refusals["unique"][1]
    assert "the format cannot be compiled: Invalid range" in played.refusals["range"][1]
    assert played.outcome is not None
    assert played.outcome.error is None
    kept = [trajectory.kept for trajectory in played.outcome.trajectories]
    assert all(sets is not None for sets in kept)
    for request, completion in played.sampled:
        assert request.sampling.format is not None
        assert completion.kept is not None
        assert completion.kept.sizes().min() < VOCAB_SIZE - 3  # never a special token


def test_reasoning_comes_before_the_format_and_is_split_off(engine: RemoteEngine) -> None:
    played: FormatSession = engine.call(play_thinking)
    assert all(request.sampling.format is not None for request, _ in played.sampled)
    chats = [each for each in played.sampled if each[0].sampling.format.thought is not None]  # type: ignore[union-attr]
    assert len(chats) > 8
    ended = 0
    for _, completion in chats:
        thought, tag, rest = text_of(completion.token_ids).partition("</think>")
        if tag and completion.finish_reason == "stop" and completion.token_ids[-1] == EOS:
            ended += 1
            assert compact(rest) in CHOICES
        assert completion.token_ids[-1] != EOS or tag, thought
    for text, reason in zip(played.texts["chat"], played.reasons["chat"], strict=True):
        assert compact(text) in CHOICES if reason == "stop" else text == "" or compact(text) not in CHOICES
    assert any(played.reasoning["chat"])


def test_format_in_a_run_without_recorded_sets_is_refused(engine: RemoteEngine) -> None:
    played: FormatSession = engine.call(play_unrecorded)
    assert not played.texts
    status, text = played.refusals["chat"]
    assert status == 400
    assert "the trainer models only with rollout.keep_sampling_mask=true; set it" in text
    assert played.refusals["streamed"][0] == 400


def test_responses_keep_their_format_over_an_update(
    engine: RemoteEngine, model: Any, done: dict[str, Completion], allowed: AllowedTokens
) -> None:
    """Half of the responses run during the update, and half are aborted before it and continued after it."""
    assert done
    trainer = HFTrainer(copy.deepcopy(model), engine, 1 << 20, 2)
    base = engine.weight_version + 1
    publish_update(trainer, base, True)
    models = {base: copy.deepcopy(trainer.model)}
    requests = [each for name, each in FORMATTED.items() if " full " in name]
    stopped = requests[::2]
    engine.call("submit", requests)
    completions = engine.call(steps, 7)[1]
    parts = engine.call("abort", [request.request_id for request in stopped])
    trainer.perturb(1)
    publish_update(trainer, base + 1, True)
    models[base + 1] = copy.deepcopy(trainer.model)
    left = {each.request_id for each in parts}
    engine.call("submit", resume([each for each in stopped if each.request_id in left], parts))
    completions += finish(engine)
    assert {each.request_id for each in completions} == {each.request_id for each in requests}
    assert sum(len({*each.versions.tolist()}) == 2 for each in completions) > 6
    for completion in completions:
        request = REQUESTS[completion.request_id]
        assert request.sampling.format is not None
        assert completion.kept is not None
        sets = allowed.sets(request.sampling.format, tuple(completion.token_ids.tolist()))
        np.testing.assert_array_equal(members(completion.kept), sets)
        np.testing.assert_allclose(completion.logp, logp_of(models, request, completion, sets), atol=TOLERANCE)
