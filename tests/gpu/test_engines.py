"""vLLM on GPUs as a colocated run uses it: with CUDA graphs, it sleeps without weights, receives new weights while only
the weights are awake, and then computes with exactly these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.types import GenerationRequest, SamplingOptions
from tests.contract.engines import PASS_TOKENS, RemoteEngine, start_engine
from tests.contract.expert_layouts import layouts_read_wrongly
from tests.contract.hf_trainer import HFTrainer
from tests.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.vllm

SIZES = {"hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2}
# Every token goes to all experts, so that rounding to bfloat16 cannot change the choice.
KINDS = {"qwen3": SIZES, "qwen3_moe": SIZES | {"moe_intermediate_size": 64, "num_experts_per_tok": 8}}
ONE, TWO = pytest.mark.cuda, pytest.mark.gpus(2)
BUCKETS = 100 << 10
"""Bucket size in bytes, so small that a model spans several buckets."""
SMALL = {"gpu_memory_fraction": 0.3, "max_batched_tokens": PASS_TOKENS}
CACHED = 2 << 30
"""Bytes that a test leaves in the cache of torch's allocator."""


@pytest.fixture(
    scope="module",
    params=[pytest.param((kind, tp), marks=ONE if tp == 1 else TWO) for kind in KINDS for tp in (1, 2)],
    ids=str,
)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start an engine with random weights, and a trainer of the same kind of model."""
    kind, tp = request.param
    directory = tmp_path_factory.mktemp("model")
    make_model(kind, 0).save_pretrained(directory)
    engine = start_engine("vllm", directory, "bfloat16", load_weights=False, tp=tp, **SMALL)
    yield engine, HFTrainer(make_model(kind, 1), engine, BUCKETS, 2)
    engine.shutdown()


def make_model(kind: str, seed: int) -> Any:
    return tiny_model(kind, seed=seed, **KINDS[kind]).to(torch.bfloat16)


def test_weights_that_come_to_a_waking_engine_are_the_trainers(started: Any) -> None:
    engine, trainer = started
    assert engine.call(uses_graphs)
    for version in (1, 2, 3):
        sleep_and_sync(engine, trainer, version)
        assert trainer.certify() > 10
        # In nats: bfloat16 and float32 differ where logits are large; with the weights of another version the gap is
        # at least 4.
        assert largest_gap(engine, trainer.model, version) < 0.5
        trainer.perturb(version)


def test_experts_in_the_layouts_of_all_gpus_are_read_back(started: Any) -> None:
    """The installed FlashInfer converts the experts: vLLM selects its kernels on Blackwell."""
    if find_spec("flashinfer") is None:
        pytest.skip("needs FlashInfer")
    engine, _ = started
    assert engine.call(layouts_read_wrongly) == []


def test_memory_of_an_update_is_free_before_the_kv_cache_wakes(started: Any, report: Callable[[str], None]) -> None:
    """The four points of a step (observe.memory_report). The trainer of this test is on the CPU."""
    engine, trainer = started
    used = {}

    def measure(point: str) -> None:
        used[point] = [memory.used_bytes for memory in engine.call("device_memory")]

    measure("generating")
    assert engine.call(put_to_sleep) > 0
    measure("asleep")
    engine.call("wake_up", "weights")
    measure("weights awake")
    engine.call(fill_cache)
    measure("cache filled")
    trainer.publish(9)
    measure("updated")
    engine.call("wake_up", "kv_cache")
    measure("KV cache awake")
    report(", ".join(f"{point} {max(each) / 2**30:.2f} GiB" for point, each in used.items()))
    for rank, awake in enumerate(used["weights awake"]):
        assert used["asleep"][rank] < awake < used["generating"][rank]
        assert used["cache filled"][rank] > awake + CACHED // 2
        # Communicators and workspaces that the first update creates stay.
        assert used["updated"][rank] < awake + CACHED // 4
        assert used["KV cache awake"][rank] > used["updated"][rank]


def fill_cache(engine: Any) -> None:
    """Leave memory in the cache of torch's allocator on every rank. Runs in the engine's process."""
    engine._engine.model_executor.collective_rpc(allocate_and_free)


def allocate_and_free(worker: Any) -> None:
    torch.empty(CACHED, dtype=torch.uint8, device="cuda")


def test_long_prompts_with_seeds_are_computed_in_pieces(started: Any) -> None:
    """vLLM would rewind the random generators of prompts that are not complete."""
    engine, trainer = started
    sleep_and_sync(engine, trainer, 10)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, size=30).astype(np.int32) for _ in range(8)]
    requests = [GenerationRequest(str(i), p, i, SamplingOptions(8, temperature=1.0)) for i, p in enumerate(prompts)]
    assert sum(len(prompt) for prompt in prompts) > PASS_TOKENS
    together = engine.generate(requests)
    assert sorted(together) == [str(i) for i in range(8)]
    assert all(len(done.token_ids) == len(done.logp) > 0 for done in together.values())


def uses_graphs(engine: Any) -> bool:
    """Return whether the engine uses CUDA graphs. Runs in the engine's process."""
    config = engine._engine.vllm_config
    return not config.model_config.enforce_eager and config.compilation_config.cudagraph_mode.name != "NONE"


def sleep_and_sync(engine: RemoteEngine, trainer: HFTrainer, version: int) -> None:
    """Run the phases of a step: the engine sleeps, its weights wake up, a sync, its KV cache wakes up."""
    assert engine.call(put_to_sleep) > 0
    engine.call("wake_up", "weights")
    trainer.publish(version)
    engine.call("wake_up", "kv_cache")


def put_to_sleep(engine: Any) -> int:
    """Put the engine to sleep without its weights, and return the freed bytes. Runs in the engine's process."""
    return int(engine.sleep(keep_weights=False))


def largest_gap(engine: RemoteEngine, model: Any, version: int) -> float:
    """Return the largest difference between log-probabilities of generated tokens in the engine and in transformers, in
    nats."""
    rng = np.random.default_rng(version)
    prompts = [rng.integers(2, VOCABULARY, size=12).astype(np.int32) for _ in range(4)]
    requests = [GenerationRequest(str(i), p, 0, SamplingOptions(10, temperature=0.0)) for i, p in enumerate(prompts)]
    gaps = []
    completions = engine.generate(requests)
    for request in requests:
        done = completions[request.request_id]
        assert set(done.versions.tolist()) == {version}
        ids = torch.from_numpy(np.concatenate([request.token_ids, done.token_ids]).astype(np.int64))
        with torch.no_grad():
            logp = model.float()(ids[None]).logits[0, 11:-1].log_softmax(-1)
        model.to(torch.bfloat16)
        gaps.append((logp.gather(1, ids[12:, None])[:, 0] - torch.from_numpy(done.logp)).abs().max())
    return float(torch.stack(gaps).max())
