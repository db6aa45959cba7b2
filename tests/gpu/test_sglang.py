"""SGLang on GPUs as a colocated run uses it: with CUDA graphs, it sleeps by tags, receives new weights while only the
weights are awake, and then computes with exactly these. The engine starts below the rules of the configuration.

The order shows the cause of a failure: start and one update; a certificate that must differ; sampling; sleep.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.types import Completion, GenerationRequest, SamplingOptions
from tests.contract.engines import ATTENTION_DP, start_engine
from tests.contract.hf_trainer import HFTrainer
from tests.gpu.test_engines import BUCKETS, ONE, SIZES, TWO, largest_gap, sleep_and_sync
from tests.tiny_models import VOCABULARY, YARN, tiny_model

pytestmark = pytest.mark.sglang

# Every token goes to all experts, so that rounding to bfloat16 cannot change the choice.
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 8}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""Head sizes of DeepSeek-V3, for which attention kernels exist."""
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,
    "qwen3_moe": SIZES | EXPERTS,
    "deepseek_v3": SIZES | EXPERTS | LATENT | {"rope_parameters": YARN},
}
FOR_DEEPEP = {"hidden_size": 2048, "moe_intermediate_size": 256}
"""Sizes for which DeepEP and DeepGEMM have kernels."""
REQUESTS_BY_RANK = "qwen3_moe, requests by rank"
"""Kind of model whose engine has attention data parallelism."""
GAP_NATS = 0.5
"""bfloat16 and float32 differ where logits are large; with the weights of another version the gap is at least 4."""
VERSIONS = itertools.count(1)


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((kind, tp), marks=ONE if tp == 1 else TWO) for kind in KINDS for tp in (1, 2)),
        pytest.param((REQUESTS_BY_RANK, 2), marks=TWO),
    ],
    ids=str,
)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start an engine with random weights, and a trainer of the same kind of model. Weights are version 1 or later."""
    kind, tp = request.param
    directory = tmp_path_factory.mktemp("model")
    make_model(kind, 0).save_pretrained(directory)
    settings: dict[str, Any] = {"tp": tp, "gpu_memory_fraction": 0.1, "capture_routing": kind != "qwen3"}
    settings |= ATTENTION_DP if kind == REQUESTS_BY_RANK else {}
    engine = start_engine("sglang", directory, "bfloat16", load_weights=False, **settings)
    trainer = HFTrainer(make_model(kind, 1), engine, BUCKETS, 2)
    trainer.publish(next(VERSIONS))
    yield engine, trainer
    engine.shutdown()


def make_model(kind: str, seed: int) -> Any:
    if kind == REQUESTS_BY_RANK:
        return tiny_model("qwen3_moe", seed=seed, **(KINDS["qwen3_moe"] | FOR_DEEPEP)).to(torch.bfloat16)
    return tiny_model(kind, seed=seed, **KINDS[kind]).to(torch.bfloat16)


def gap(started: Any) -> float:
    engine, trainer = started
    return largest_gap(engine, deepcopy(trainer.model), engine.weight_version)


def make_requests(temperature: float = 1.0) -> list[GenerationRequest]:
    """Return requests of different lengths, so that the batch shrinks while it runs."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, size=6 + i).astype(np.int32) for i in range(8)]
    return [GenerationRequest(str(i), p, i, SamplingOptions(3 + 2 * i, temperature)) for i, p in enumerate(prompts)]


def test_greedy_responses_follow_each_update(started: Any) -> None:
    _, trainer = started
    assert gap(started) < GAP_NATS
    trainer.perturb(next(VERSIONS))
    assert gap(started) > GAP_NATS  # the engine still has the previous weights
    trainer.publish(next(VERSIONS))
    assert gap(started) < GAP_NATS
    assert trainer.certify() > 10


def test_certificate_objects_to_other_weights(started: Any) -> None:
    _, trainer = started
    trainer.publish(next(VERSIONS))
    trainer.perturb(next(VERSIONS))
    with pytest.raises(WeightSyncError, match="differ"):
        trainer.certify()
    trainer.publish(next(VERSIONS))
    assert trainer.certify() > 10


def test_decoding_uses_cuda_graphs(started: Any, report: Callable[[str], None]) -> None:
    sizes = started[0].call(graph_batch_sizes)
    assert max(sizes, default=0) >= len(make_requests())
    report(f"graphs of {len(sizes)} batch sizes")


def graph_batch_sizes(engine: Any) -> list[int]:
    return list(engine._ranks.call("graph_batch_sizes")[0])


def test_sampled_responses_end_at_different_steps(started: Any) -> None:
    """Requests that end leave the batch with their seeds, which must be on the GPU."""
    engine, trainer = started
    completions = engine.generate(make_requests())
    for request in make_requests():
        done = completions[request.request_id]
        assert 0 < len(done.token_ids) <= request.sampling.max_response_tokens
        assert logp_gap(trainer.model, request, done) < GAP_NATS


def logp_gap(model: Any, request: GenerationRequest, done: Completion) -> float:
    ids = torch.from_numpy(np.concatenate([request.token_ids, done.token_ids]).astype(np.int64))
    first = len(request.token_ids)
    with torch.no_grad():
        logp = deepcopy(model).float()(ids[None]).logits[0, first - 1 : -1].log_softmax(-1)
    return float((logp.gather(1, ids[first:, None])[:, 0] - torch.from_numpy(done.logp)).abs().max())


def test_truncated_sampling_stays_within_its_tokens(started: Any) -> None:
    engine, trainer = started
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, VOCABULARY, size=9).astype(np.int32) for _ in range(4)]
    options = SamplingOptions(8, 1.0, top_k=1 << 20, top_p=1.0), SamplingOptions(8, 1.0, top_k=2), SamplingOptions(8, 0)
    requests = [GenerationRequest(f"{i}", p, i, options[i % 3]) for i, p in enumerate(prompts)]
    completions = engine.generate(requests)
    two = completions["1"]
    ids = torch.from_numpy(np.concatenate([prompts[1], two.token_ids]).astype(np.int64))
    with torch.no_grad():
        logp = deepcopy(trainer.model).float()(ids[None]).logits[0, 8:-1].log_softmax(-1)
    # Rounding can make the third token appear as the second.
    floor = logp.topk(2, dim=-1).values[:, 1] - GAP_NATS
    assert (logp.gather(1, ids[9:, None])[:, 0] >= floor).all()


def test_routing_has_the_experts_of_every_token(started: Any) -> None:
    engine, trainer = started
    if not trainer.model.config.to_dict().get("num_experts_per_tok"):
        pytest.skip("the model has no experts")
    for request in make_requests():
        done = engine.generate([request])[request.request_id]
        assert done.routed_experts is not None
        assert len(done.routed_experts) == len(request.token_ids) + len(done.token_ids) - 1
        assert (np.sort(done.routed_experts, axis=-1) == np.arange(8)).all()


def test_update_while_the_engine_wakes_is_exact(started: Any, report: Callable[[str], None]) -> None:
    engine, trainer = started
    for _ in range(2):
        trainer.perturb(next(VERSIONS))
        sleep_and_sync(engine, trainer, next(VERSIONS))
        assert gap(started) < GAP_NATS
        assert trainer.certify() > 10
    freed = engine.call(sleep, False)
    report(f"sleep frees {freed / 2**30:.2f} GiB")
    assert freed > 2**30
    engine.call("wake_up", "weights")
    trainer.publish(next(VERSIONS))
    engine.call("wake_up", "kv_cache")


def sleep(engine: Any, keep_weights: bool) -> int:
    """Put the engine to sleep, and return the freed bytes. Runs in the engine's process."""
    return int(engine.sleep(keep_weights=keep_weights))


def test_kept_weights_return_exactly(started: Any) -> None:
    engine, trainer = started
    trainer.publish(next(VERSIONS))
    assert engine.call(sleep, True) > 2**30
    engine.call("wake_up", "weights")
    engine.call("wake_up", "kv_cache")
    assert trainer.certify() > 10
    assert gap(started) < GAP_NATS


def test_discarded_weights_must_be_updated_before_the_cache_returns(started: Any) -> None:
    engine, trainer = started
    assert engine.call(sleep, False) > 0
    engine.call("wake_up", "weights")
    with pytest.raises(WeightSyncError, match="discarded its weights"):
        engine.call("wake_up", "kv_cache")
    trainer.publish(next(VERSIONS))
    engine.call("wake_up", "kv_cache")
    assert gap(started) < GAP_NATS


def test_engine_sleeps_right_after_an_abort(started: Any) -> None:
    """SGLang releases memory only when it is idle, one step after the last abort."""
    engine, _ = started
    assert engine.call(abort_and_sleep, make_requests()) > 0
    engine.call("wake_up", "weights")
    engine.call("wake_up", "kv_cache")
    assert gap(started) < GAP_NATS


def abort_and_sleep(engine: Any, requests: list[GenerationRequest]) -> int:
    """Abort running requests, then sleep. Returns the freed bytes. Runs in the engine's process."""
    engine.submit(requests)
    engine.step()
    engine.step()
    engine.abort(engine.running_ids)
    return int(engine.sleep(keep_weights=True))


def equally_long(seed: int) -> list[GenerationRequest]:
    """Return 32 greedy requests of 24 tokens, so that all batches have the same size."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCABULARY, size=8).astype(np.int32) for _ in range(32)]
    return [GenerationRequest(str(i), p, i, SamplingOptions(24, temperature=0.0)) for i, p in enumerate(prompts)]


def test_several_steps_per_call_finish_all_requests(started: Any, report: Callable[[str], None]) -> None:
    engine, _ = started
    requests = equally_long(4)
    engine.generate(requests)  # compiles kernels
    lengths = {}
    for limit in (1, 4):
        lengths[limit], seconds = engine.call(run_timed, requests, limit)
        report(f"{limit} steps per call: {1e3 * seconds / 24:.2f} ms per step of 32 requests")
    assert lengths[1] == lengths[4] == [24] * 32


def test_overlap_schedule_across_an_update_gives_the_same_tokens(started: Any, report: Callable[[str], None]) -> None:
    """The pass in flight when the update begins belongs to the earlier weights."""
    engine, trainer = started
    if trainer.model.config.model_type != "qwen3_moe":
        pytest.skip("one kind of model is enough for the schedule")
    rollout = engine.settings["rollout_config"]
    settings = {"tp": rollout.tp, "gpu_memory_fraction": 0.1, "capture_routing": True, "overlap_schedule": True}
    overlapped = start_engine("sglang", engine.directory, "bfloat16", load_weights=False, **settings)
    try:
        trainers = [trainer, HFTrainer(deepcopy(trainer.model), overlapped, BUCKETS, 2)]
        requests, first, second, found = equally_long(5), next(VERSIONS), next(VERSIONS), []
        for each, served, steps in zip(trainers, (engine, overlapped), (7, 6), strict=True):
            each.publish(first)
            served.call(run_timed, requests, 4)  # compiles kernels
            seconds = served.call(run_timed, requests, 4)[1]
            report(f"{served.settings['rollout_config'].overlap_schedule}: {1e3 * seconds / 24:.2f} ms per step")
            served.call(run_steps, requests, steps)
            each.perturb(second)
            each.publish(second)
            found.append({done.request_id: done for done in served.call(run_steps, [], 24)})
        for name, done in found[0].items():
            other = found[1][name]
            assert done.versions.tolist() == other.versions.tolist() == [first] * 7 + [second] * 17
            assert done.token_ids.tolist() == other.token_ids.tolist()
            assert np.abs(done.logp - other.logp).max() < GAP_NATS
            assert len(done.routed_experts) == len(other.routed_experts) == 8 + 23
    finally:
        overlapped.shutdown()


def run_steps(engine: Any, requests: list[GenerationRequest], count: int) -> list[Completion]:
    """Submit requests, run up to `count` steps, and return what has finished. Runs in the engine's process."""
    engine.submit(requests)
    finished = []
    for _ in range(count):
        finished += engine.step()[1]
    return finished


def run_timed(engine: Any, requests: list[GenerationRequest], limit: int) -> tuple[list[int], float]:
    """Run requests without end of sequence. Returns their lengths and the seconds. Runs in the engine's process."""
    engine._settings = replace(engine._settings, eos_token_ids=())
    engine.submit(requests)
    began, lengths = time.perf_counter(), []
    while engine.num_running:
        lengths += [len(completion.token_ids) for completion in engine.step(limit)[1]]
    return lengths, time.perf_counter() - began
