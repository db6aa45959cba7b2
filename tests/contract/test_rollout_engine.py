"""Contract of every Engine, compared with transformers on the same weights."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.engines.routing_cache import RoutingCache
from mcore_rl.errors import ConfigError, DataError
from mcore_rl.types import Completion, GenerationRequest, SamplingOptions
from tests.contract import gateway_session
from tests.contract.engines import PASS_TOKENS, RemoteEngine
from tests.contract.vllm_internals import profile_sampler, rows_with_generators, run_norms
from tests.tiny_models import VOCABULARY

EOS = 1


def require_vllm(engine: RemoteEngine, *, rank: bool = False) -> None:
    """Skip tests of vLLM's internals on other engines. `rank`: also if ranks run outside the engine's process."""
    if engine.kind != "vllm":
        pytest.skip("tests internals of vLLM")
    if rank and num_ranks(engine) > 1:
        pytest.skip("tests internals of a rank in another process")


def num_ranks(engine: RemoteEngine) -> int:
    tp: int = engine.settings["rollout_config"].tp
    return tp


def make_requests(
    sampling: SamplingOptions, num_prompts: int = 6, samples: int = 2, seed: int = 0
) -> list[GenerationRequest]:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, VOCABULARY, size=3 + 2 * p).astype(np.int32) for p in range(num_prompts)]
    return [
        GenerationRequest(f"{p}.{s}", prompt, 1000 * seed + 10 * p + s, sampling)
        for p, prompt in enumerate(prompts)
        for s in range(samples)
    ]


def reference_logp(model: Any, request: GenerationRequest, done: Completion, temperature: float) -> torch.Tensor:
    """Compute log-probabilities of each response token with transformers. Shapes: [T, V]."""
    return (reference_logits(model, request, done) / temperature).log_softmax(-1)


def reference_logits(model: Any, request: GenerationRequest, done: Completion) -> torch.Tensor:
    """Compute logits of each response token with transformers. Shapes: float64 [T, V]."""
    ids = np.concatenate([request.token_ids, done.token_ids]).astype(np.int64)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.from_numpy(ids)[None]).logits[0, len(request.token_ids) - 1 : -1]
    return logits.double()


def test_generate_greedy_equals_argmax_of_transformers(engine: RemoteEngine, model: Any) -> None:
    requests = make_requests(SamplingOptions(12, temperature=0.0), samples=1)
    done = engine.generate(requests)
    for request in requests:
        completion = done[request.request_id]
        logp = reference_logp(model, request, completion, 1.0)
        assert completion.token_ids.tolist() == logp.argmax(-1).tolist()
        # float32 on both sides, with another order of sums
        np.testing.assert_allclose(completion.logp, logp.max(-1).values, atol=1e-4)


def test_generate_mixed_temperatures_use_own_temperature(engine: RemoteEngine, model: Any) -> None:
    """The batch also contains greedy and truncated requests."""
    mixed = [
        *(SamplingOptions(16, temperature=temperature) for temperature in (0.3, 1.0, 2.0, 0.01)),
        *(SamplingOptions(16, temperature=0.0), SamplingOptions(16, temperature=1.3, top_k=4)),
    ]
    requests = make_requests(mixed[0])
    requests = [replace(each, sampling=mixed[i % len(mixed)]) for i, each in enumerate(requests)]
    done = engine.generate(requests)
    for request in requests:
        sampling, completion = request.sampling, done[request.request_id]
        assert completion.sampled_at(sampling.temperature).tolist() == pytest.approx(
            [sampling.temperature] * len(completion.token_ids)
        )
        if sampling.top_k == -1:
            logp = reference_logp(model, request, completion, sampling.temperature or 1.0)
            chosen = logp.gather(1, torch.from_numpy(completion.token_ids.astype(np.int64))[:, None])[:, 0]
            # The rounding errors of float32 logits are divided by the temperature too.
            np.testing.assert_allclose(completion.logp, chosen, atol=1e-4 / min(1, sampling.temperature or 1))


def test_generate_repetition_penalty_lowers_earlier_tokens(engine: RemoteEngine, model: Any) -> None:
    """vLLM counts the tokens of the prompt too, SGLang does not."""
    requests = make_requests(SamplingOptions(12, temperature=0.0, repetition_penalty=1.8), samples=1)
    done, changed = engine.generate(requests), 0
    for request in requests:
        tokens = done[request.request_id].token_ids.tolist()
        seen = set(request.token_ids.tolist()) if engine.kind == "vllm" else set()
        for place, logits in enumerate(reference_logits(model, request, done[request.request_id])):
            changed += int(logits.argmax()) != tokens[place]
            earlier = sorted(seen)
            logits[earlier] = torch.where(logits[earlier] > 0, logits[earlier] / 1.8, logits[earlier] * 1.8)
            assert int(logits.argmax()) == tokens[place]
            logp = float(logits.log_softmax(-1)[tokens[place]])
            assert done[request.request_id].logp[place] == pytest.approx(logp, abs=1e-4)
            seen.add(tokens[place])
    assert changed > 0


@pytest.mark.parametrize("truncation", [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.3, "top_p": 0.8}])
def test_generate_truncation_renormalises_logp(engine: RemoteEngine, model: Any, truncation: dict[str, Any]) -> None:
    requests = make_requests(SamplingOptions(8, **truncation))
    done = engine.generate(requests)
    for request in requests:
        completion = done[request.request_id]
        logp = reference_logp(model, request, completion, 1.0)
        ordered, order = logp.exp().sort(descending=True)
        # min-p comes first: top-p refers to the rest.
        ordered = ordered.masked_fill(ordered < truncation.get("min_p", 0.0) * ordered[:, :1], 0.0)
        ordered /= ordered.sum(-1, keepdim=True)
        keep = (ordered > 0) & (ordered.cumsum(-1) - ordered < truncation.get("top_p", 1.0))
        keep[:, truncation.get("top_k", VOCABULARY) :] = False
        kept = torch.zeros_like(logp, dtype=torch.bool).scatter(1, order, keep)
        expected = logp.masked_fill(~kept, -torch.inf).log_softmax(-1)
        chosen = expected.gather(1, torch.from_numpy(completion.token_ids.astype(np.int64))[:, None])[:, 0]
        np.testing.assert_allclose(completion.logp, chosen, atol=1e-4)


def test_generate_same_seeds_repeat_tokens_and_logp(engine: RemoteEngine) -> None:
    sampling = SamplingOptions(16)
    first, again = (engine.generate(make_requests(sampling)) for _ in range(2))
    other = engine.generate(make_requests(sampling, seed=7))
    for request_id, completion in first.items():
        assert completion.token_ids.tolist() == again[request_id].token_ids.tolist()
        np.testing.assert_allclose(completion.logp, again[request_id].logp, rtol=0, atol=engine.logp_tolerance)
    assert any(first[i].token_ids.tolist() != other[i].token_ids.tolist() for i in first)
    assert first["0.0"].token_ids.tolist() != first["0.1"].token_ids.tolist()


def test_generate_tokens_do_not_depend_on_other_requests(engine: RemoteEngine) -> None:
    """The prompts exceed a pass and are cut, which must not consume random numbers."""
    requests = make_requests(SamplingOptions(16))
    assert sum(len(request.token_ids) for request in requests) > 2 * PASS_TOKENS
    together = engine.generate(requests)
    for request in requests:
        alone = engine.generate([request])[request.request_id]
        assert alone.token_ids.tolist() == together[request.request_id].token_ids.tolist()


def test_generate_more_requests_than_slots_all_finish(engine: RemoteEngine) -> None:
    requests = make_requests(SamplingOptions(6), num_prompts=10, samples=9)
    done = engine.generate(requests)
    assert sorted(done) == sorted(r.request_id for r in requests)


def check_routing(model: Any, requests: list[GenerationRequest], done: dict[str, Completion]) -> int:
    """Compare the experts of every token with transformers' routers. Returns the number of compared choices.

    Near ties in float32 are excluded, and so are the token's later layers, whose input would differ."""
    logits: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    handles = [gate.register_forward_hook(lambda _, __, out: logits.append(out[0])) for gate in gates]
    compared = 0
    for request in requests:
        completion = done[request.request_id]
        ids = np.concatenate([request.token_ids, completion.token_ids[:-1]]).astype(np.int64)
        logits.clear()
        with torch.no_grad():
            model(torch.from_numpy(ids)[None])
        best = torch.stack(logits, 1).topk(3)  # [tokens, layers, 3]
        clear = (best.values[..., 1] - best.values[..., 2] > 1e-4).cumprod(1).bool().numpy()
        found = completion.routed_experts
        assert found is not None
        assert found.dtype == np.uint8
        assert found.shape == (len(ids), len(gates), 2)
        expected = best.indices[..., :2].sort(-1).values.numpy()
        np.testing.assert_array_equal(np.sort(found, -1)[clear], expected[clear])
        compared += int(clear.sum())
    for handle in handles:
        handle.remove()
    return compared


def test_generate_routed_experts_equal_transformers(engine: RemoteEngine, model: Any) -> None:
    """Prompts in pieces and responses of different lengths."""
    requests = make_requests(SamplingOptions(16), num_prompts=8) + make_requests(SamplingOptions(5), 3)[:1]
    requests[-1] = replace(requests[-1], request_id="short")
    done = engine.generate(requests)
    tokens = sum(len(r.token_ids) + len(done[r.request_id].token_ids) - 1 for r in requests)
    assert check_routing(model, requests, done) > 0.95 * tokens * model.config.num_hidden_layers


def _generate_with_shared_prefixes(engine: Any, requests: list[GenerationRequest]) -> tuple[list[Completion], int]:
    """Reset the prefix cache when the first request finishes. Returns completions and number of computed tokens."""
    config, write, rows = engine._config, RoutingCache.write, []

    def counted(cache: RoutingCache, layer: int, slots: torch.Tensor, experts: torch.Tensor) -> None:
        rows.extend([len(slots)] if layer == 0 else [])
        write(cache, layer, slots, experts)

    done: list[Completion] = []

    def on_finish(completion: Completion) -> None:
        if not done:
            assert engine._core.reset_prefix_cache(reset_running_requests=True)
        done.append(completion)

    engine._config = replace(config, max_prompt_tokens=48)
    RoutingCache.write = counted  # type: ignore[method-assign]
    try:
        engine.generate(requests, on_finish)
    finally:
        engine._config, RoutingCache.write = config, write  # type: ignore[method-assign]
    return done, sum(rows)


def test_generate_shared_prefix_and_recompute_keep_experts(engine: RemoteEngine, model: Any) -> None:
    require_vllm(engine)
    rng = np.random.default_rng(6)
    common = rng.integers(2, VOCABULARY, size=34).astype(np.int32)  # longer than a block of the cache
    prompts = [np.concatenate([common, rng.integers(2, VOCABULARY, size=n).astype(np.int32)]) for n in (1, 4, 9, 2)]
    requests = [
        GenerationRequest(str(i), prompt, i, SamplingOptions(length))
        for i, (prompt, length) in enumerate(zip(prompts, (4, 14, 12, 16), strict=True))
    ]
    completions, computed = engine.call(_generate_with_shared_prefixes, requests)
    done = {completion.request_id: completion for completion in completions}
    lengths = [len(r.token_ids) + len(done[r.request_id].token_ids) - 1 for r in requests]
    assert check_routing(model, requests, done) > 0.95 * sum(lengths) * model.config.num_hidden_layers
    if (
        not torch.cuda.is_available() and num_ranks(engine) == 1
    ):  # three requests hit a block of 32; some tokens were computed twice
        assert sum(lengths) - 3 * 32 < computed < sum(lengths)


def _batch_limits(engine: Any) -> tuple[int, bool, int]:
    scheduler = engine._engine.vllm_config.scheduler_config
    return scheduler.max_num_batched_tokens, scheduler.enable_chunked_prefill, scheduler.max_num_seqs


def test_engine_max_batched_tokens_limits_batch(engine: RemoteEngine) -> None:
    require_vllm(engine)
    assert engine.call(_batch_limits) == (PASS_TOKENS, True, 32)


def _start_costs(engine: Any) -> tuple[bool, bool]:
    from vllm.model_executor.models import registry

    return registry._run_in_subprocess(os.getpid) == os.getpid(), "torch._inductor.lowering" in sys.modules


def test_vllm_on_cpu_inspects_models_here_and_skips_the_compiler(engine: RemoteEngine) -> None:
    require_vllm(engine)
    if torch.version.cuda is not None:
        pytest.skip("a CUDA build inspects models in a subprocess and may compile them")
    assert engine.call(_start_costs) == (True, False)


def test_generate_finish_reasons_are_stop_and_length(engine: RemoteEngine) -> None:
    done = engine.generate(make_requests(SamplingOptions(32), num_prompts=8, samples=4))
    reasons = {completion.finish_reason for completion in done.values()}
    assert reasons == {"stop", "length"}
    for completion in done.values():
        ids = completion.token_ids.tolist()
        stopped = completion.finish_reason == "stop"
        assert (ids[-1] == EOS) == stopped
        assert EOS not in ids[:-1]
        assert len(completion.logp) == len(ids)
        assert stopped or len(ids) == 32


def test_generate_longest_prompt_fits_longest_response(engine: RemoteEngine) -> None:
    prompts = np.random.default_rng(6).integers(2, VOCABULARY, size=(6, 32)).astype(np.int32)
    requests = [GenerationRequest(str(n), prompt, n, SamplingOptions(32)) for n, prompt in enumerate(prompts)]
    done = engine.generate(requests)
    cut = [request for request in requests if done[request.request_id].finish_reason == "length"]
    assert [len(done[request.request_id].token_ids) for request in cut] == [32] * len(cut)
    whole = done[cut[0].request_id]
    partial = replace(
        whole,
        token_ids=whole.token_ids[:31],
        logp=whole.logp[:31],
        versions=whole.versions[:31],
        finish_reason="abort",
        routed_experts=None if whole.routed_experts is None else whole.routed_experts[: 32 + 31 - 1],
    )
    (resumed,) = engine.generate([replace(cut[0], partial=partial)]).values()
    assert resumed.token_ids.tolist() == whole.token_ids.tolist()


def test_generate_invalid_request_raises_and_leaves_no_state(engine: RemoteEngine) -> None:
    ids = np.array([5, 6], np.int32)
    bad = [
        (DataError, "max_prompt_tokens", np.full(57, 5, np.int32), 8),
        (DataError, "is empty", ids[:0], 8),
        (DataError, "token id", np.array([VOCABULARY], np.int32), 8),
        (ConfigError, "max_response_tokens", ids, 33),
    ]
    for error, message, tokens, length in bad:
        with pytest.raises(error, match=message):
            engine.generate([GenerationRequest("bad", tokens, 0, SamplingOptions(length))])
    twice = GenerationRequest("same", ids, 0, SamplingOptions(4))
    with pytest.raises(ValueError, match="differ"):
        engine.generate([twice, twice])
    assert list(engine.generate([twice])) == ["same"]


def _generate_with_a_failing_callback(engine: Any, requests: list[GenerationRequest]) -> str:
    def fail(completion: Completion) -> None:
        raise LookupError(completion.request_id)

    try:
        engine.generate(requests, fail)
    except LookupError:
        return "raised"
    return "swallowed"


def test_generate_failing_callback_raises_and_engine_still_works(engine: RemoteEngine) -> None:
    requests = make_requests(SamplingOptions(4))
    before = engine.generate(requests)
    assert engine.call(_generate_with_a_failing_callback, requests) == "raised"
    after = engine.generate(requests)
    assert {i: c.token_ids.tolist() for i, c in before.items()} == {i: c.token_ids.tolist() for i, c in after.items()}


def _sleep(engine: Any, keep_weights: bool) -> int:
    return engine.sleep(keep_weights=keep_weights)


@pytest.mark.parametrize("weights_only_between", [False, True])
def test_sleep_wake_up_generates_same_tokens(engine: RemoteEngine, weights_only_between: bool) -> None:
    """At a checkpoint after a weight sync, only the weights wake up, and sleep again without generation in between."""
    requests = make_requests(SamplingOptions(8))
    before = engine.generate(requests)
    assert engine.call(_sleep, True) > 0.9 * 0.03 * 2**30  # start_engine's cache, minus a partial block
    if weights_only_between:
        engine.call("wake_up", "weights")
        engine.call(_sleep, True)
    else:
        assert engine.call(_sleep, True) == 0
    for part in ("weights", "kv_cache"):
        with pytest.raises(RuntimeError, match=part):
            engine.generate(requests)
        engine.call("wake_up", part)
    after = engine.generate(requests)
    for request_id, completion in before.items():
        assert completion.token_ids.tolist() == after[request_id].token_ids.tolist()
        np.testing.assert_allclose(completion.logp, after[request_id].logp, rtol=0, atol=engine.logp_tolerance)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA vLLM uses its own kernels")
def test_vllm_norms_use_compiled_kernels_on_strided_rows(engine: RemoteEngine) -> None:
    require_vllm(engine, rank=True)
    rng = np.random.default_rng(0)
    for width in (16, 12):  # the kernels reject rows of 12
        shapes = ((5, 4, width), (5, width), (5, width), (width,))
        found = engine.call(run_norms, [rng.standard_normal(shape).astype(np.float32) for shape in shapes])
        assert found["provider"] == ["mcore_rl_cpu"] * 2
        for name in ("norm", "fused"):
            for ours, native in zip(found[f"{name} ours"], found[f"{name} native"], strict=True):
                np.testing.assert_allclose(ours, native, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA a kernel samples without memory for noise")
def test_vllm_profiling_pass_draws_noise(engine: RemoteEngine) -> None:
    """vLLM measures the memory of this pass, which must sample as a step does."""
    require_vllm(engine, rank=True)
    rows, calls = engine.call(profile_sampler)
    # With drafts, vLLM also samples 32 requests with a draft of one token each.
    sampled = 32 if engine.settings["rollout_config"].draft == "none" else 32 + 64
    assert (rows, sum(calls)) == (32, sampled * VOCABULARY)


def test_vllm_unfinished_prompts_keep_generators_out(engine: RemoteEngine) -> None:
    require_vllm(engine, rank=True)
    assert engine.call(rows_with_generators) == ([0, 2], [0, 1, 2])


def test_gateway_trains_the_sampled_tokens_with_logp_of_the_model(engine: RemoteEngine, model: Any) -> None:
    """A program continues, retries, edits and branches a conversation; played again, it gets the same replies."""
    played, again = (engine.call(gateway_session.play) for _ in range(2))
    assert [reply.text for reply in played.replies] == [reply.text for reply in again.replies]
    gateway_session.assert_continues_sampled_tokens(played)
    gateway_session.assert_trains_each_sampled_token_once(played)
    for trajectory in played.outcome.trajectories:
        ids = np.concatenate([trajectory.prompt_ids, trajectory.token_ids]).astype(np.int64)
        with torch.no_grad():
            logits = model(torch.from_numpy(ids)[None]).logits[0, len(trajectory.prompt_ids) - 1 : -1]
        logp = logits.double().log_softmax(-1).gather(1, torch.from_numpy(ids[len(trajectory.prompt_ids) :])[:, None])
        trained = trajectory.trained > 0
        # float32 on both sides, with another order of sums
        np.testing.assert_allclose(trajectory.logp[trained], logp[:, 0].numpy()[trained], atol=1e-4)
