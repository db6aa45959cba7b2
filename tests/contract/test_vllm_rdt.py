"""weights.transport=vllm_rdt without what it needs (GPUs, NIXL): vLLM's own trainer and consumer run, on the CPU, and
what an engine computes with afterwards is the transformers model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

from mcore_rl.config.schema import Config, RolloutConfig
from mcore_rl.errors import WeightSyncError
from mcore_rl.runtime.cluster import ray_cluster
from mcore_rl.types import Completion, GenerationRequest, SamplingOptions
from mcore_rl.weights.slices.shard_map import ShardMap
from mcore_rl.weights.transports.topology import VLLM_RDT
from mcore_rl.weights.whole import WholeTensors
from tests.contract.engines import RemoteEngine, start_engine
from tests.contract.hf_trainer import LAYOUT, HFTrainer, hf_tensors
from tests.contract.rdt_pull import prepare, pull
from tests.contract.update_checks import check_greedy
from tests.tiny_models import tiny_model, write_tiny_model
from tests.unit.weights.delivery import Sync, Tensors, trainer_tensors

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # No tied head, no experts of another size: vLLM packs and pads these for CPUs, which its reload does not repeat.
    "dense": ("qwen3", {}),
    "experts": ("qwen3_moe", {"moe_intermediate_size": 64}),
}


@pytest.fixture(scope="module", params=MODELS)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    family, changes = MODELS[request.param]
    model = tiny_model(family, head_dim=32, seed=3, vocab_size=128, **changes)
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    engine = start_engine("vllm", directory, load_weights=False)
    yield engine, model
    engine.shutdown()


def sources(trainer: HFTrainer) -> list[Any]:
    """What the trainer's ranks give, as vLLM's trainer asks them."""
    from mcore_rl.engines.vllm.rdt_producer import HeldTensors

    sync = Sync(trainer.plan.rows, LAYOUT, None, None, 0)  # type: ignore[arg-type]
    rows = ShardMap(trainer.plan.rows, trainer.plan.engine_layout).rows

    def source(rank: int) -> HeldTensors:
        whole = WholeTensors(rows, LAYOUT, rank, _never)
        return HeldTensors(whole, lambda: trainer_tensors(sync, rank, hf_tensors(trainer.model)))

    return [source(rank) for rank in range(LAYOUT.world_size)]


def _never(tensor: torch.Tensor, expert: bool) -> list[torch.Tensor]:
    raise AssertionError("nothing is divided among pipeline stages")


def payload_of(monkeypatch: pytest.MonkeyPatch, of_ranks: list[Any]) -> dict[str, Any]:
    """What vLLM's trainer on every rank would tell engines, once the ranks have told each other what they have."""
    from vllm.distributed.weight_transfer import sharded_rdt_trainer as upstream

    from mcore_rl.engines.vllm.rdt_producer import Producer

    engine = upstream.ShardedRDTTrainerWeightTransferEngine
    said: list[list[Any]] = [[] for _ in of_ranks]
    monkeypatch.setattr(engine, "_spawn_server", lambda self, names: setattr(self, "_server_name", "unused"))
    monkeypatch.setattr(engine, "_world_and_rank", lambda self: (len(of_ranks), self._init_info.rank))
    names = [f"producer {rank}" for rank in range(len(of_ranks))]
    monkeypatch.setattr(engine, "_all_gather_server_names", lambda self, world, rank: names)
    # Twice: the first time each says what it has, the second time all have said it.
    monkeypatch.setattr(
        engine, "_all_gather_owned", lambda self, world, mine: said[self._init_info.rank].append(mine) or [mine] * world
    )
    for rank, source in enumerate(of_ranks):
        with pytest.raises(ValueError, match="no trainer rank holds"):
            Producer(source, rank, 1, 1, namespace="ours", timeout_seconds=20)
    monkeypatch.setattr(engine, "_all_gather_owned", lambda self, world, mine: [own[0] for own in said])
    made = [Producer(source, rank, 1, 1, namespace="ours", timeout_seconds=20) for rank, source in enumerate(of_ranks)]
    payloads = [producer.payload() for producer in made]
    assert payloads[1:] == payloads[:-1], "ranks tell engines different things"
    return payloads[0]


def held_by(source: Any) -> Tensors:
    """By the pass that vLLM's trainer makes; the names come in its groups."""
    held: Tensors = {}
    for names, tensors in source.iter_groups():
        held |= {name: tensor.clone() for name, tensor in zip(names, tensors, strict=True) if tensor is not None}
    assert held.keys() == source.held_names()
    return held


def test_three_updates_in_a_row(started: tuple[RemoteEngine, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = started
    trainer = HFTrainer(model, engine, 1 << 20, 2, VLLM_RDT)
    of_ranks = sources(trainer)
    payload = payload_of(monkeypatch, of_ranks)
    floor = sum(arrivals.num_bytes for arrivals in trainer.plan.arrivals([0]).values())
    for version in (1, 2, 3):
        trainer.perturb(version)
        engine.call(prepare, payload, [held_by(source) for source in of_ranks])
        with pytest.raises(WeightSyncError, match="differ"):
            trainer.certify()
        acknowledged, pulled, freed = engine.call(pull, version)
        assert acknowledged == [floor]
        assert 0.95 * floor < sum(pulled) <= floor, "each of them aligns slices in its own way"
        assert all(pulled)
        groups = [{i for i, group in enumerate(_groups(payload)) if set(group) & s.held_names()} for s in of_ranks]
        assert [set(each) for each in freed] == groups
        assert [len(each) for each in freed] == [len(each) for each in groups]
        check_greedy(engine, model, version)
        assert trainer.certify() > 10


def test_what_vllm_cannot_record_is_said(started: tuple[RemoteEngine, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = started
    trainer = HFTrainer(model, engine, 1 << 20, 2, VLLM_RDT)
    of_ranks = sources(trainer)
    payload = payload_of(monkeypatch, of_ranks)
    missing = payload["names"].index("model.layers.0.self_attn.k_proj.weight")  # of a module that has three of them
    names = {key: [*payload[key][:missing], *payload[key][missing + 1 :]] for key in BY_NAME}
    lengths = [len(group) - (payload["names"][missing] in group) for group in _groups(payload)]
    wrong = payload | names | {"group_lens": lengths}
    with pytest.raises(WeightSyncError, match=r"weights\.transport=vllm_rdt: vLLM cannot pull .*set it to auto"):
        engine.call(prepare, wrong, [{} for _ in of_ranks])


BY_NAME = ("names", "dtype_names", "shapes", "name_owner_class")


def _groups(payload: dict[str, Any]) -> list[list[str]]:
    names, groups = iter(payload["names"]), []
    for length in payload["group_lens"]:
        groups.append([next(names) for _ in range(length)])
    return groups


def test_what_is_called_and_replaced_of_vllm_is_there() -> None:
    from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo
    from vllm.v1.executor import ray_executor_v2
    from vllm.v1.worker.gpu_worker import Worker

    for name in ("initialize_ray_cluster", "get_bundles_sorted_by_node", "RayWorkerProc"):
        assert name in inspect.getsource(ray_executor_v2.RayExecutorV2._init_executor), name
    for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        assert callable(getattr(Worker, name)), name
    wanted = {"num_consumers", "workers_per_replica", "trainer_actor_namespace", "stall_timeout_s", "rank"}
    assert wanted <= set(inspect.signature(ShardedRDTTrainerInitInfo).parameters)


@ray.remote(num_cpus=2, max_restarts=0)
class EngineActor:
    """As a run has an engine: in an actor of its own, in the bundle of its host."""

    def generate(self, directory: str, tp: int, pulls_weights: bool) -> list[tuple[list[int], list[float]]]:
        from mcore_rl.engines.vllm.engine import VllmEngine

        os.environ["VLLM_HOST_IP"] = "127.0.0.2"  # as runtime.addresses.meet_at: ranks are met there
        rollout = RolloutConfig(tp=tp, max_prompt_tokens=32, max_response_tokens=32, kv_cache_gib=0.03)
        engine = VllmEngine(
            directory,
            rollout,
            dtype="float32",
            eos_token_ids=[],
            seed=1,
            name="the engine",
            timeout_seconds=120,
            pulls_weights=pulls_weights,
        )
        prompts = [np.array([5, 6, 7 + number], np.int32) for number in range(3)]
        requests = [GenerationRequest(str(n), prompt, n, SamplingOptions(12)) for n, prompt in enumerate(prompts)]
        done: list[Completion] = []
        engine.generate(requests, done.append)
        done.sort(key=lambda completion: completion.request_id)
        assert [endpoint.address for endpoint in engine.receiver.endpoints()] == ["127.0.0.2"] * tp
        of_ray = getattr(engine._engine.model_executor, "ray_worker_handles", [])
        assert len(of_ray) == (tp if pulls_weights else 0)
        engine.shutdown()
        return [(completion.token_ids.tolist(), completion.logp.tolist()) for completion in done]


def test_ranks_that_are_rays_generate_as_others_do(tmp_path: Path) -> None:
    """Of two ranks, in the bundle that the run has: none is asked of Ray beside it."""
    write_tiny_model(tmp_path, "qwen3_moe", head_dim=32, vocab_size=128)
    config = Config()
    config.cluster.device = "cpu"
    with ray_cluster(config, {"CPU": 2.0}) as [node]:
        daemons = psutil.Process().children(recursive=True)
        results = []
        for tp, pulls_weights in ((1, False), (2, True)):
            actor = EngineActor.options(scheduling_strategy=node).remote()
            results.append(ray.get(actor.generate.remote(str(tmp_path), tp, pulls_weights)))
            ray.kill(actor)
    psutil.wait_procs(daemons, timeout=60)
    for (tokens, logp), (expected, expected_logp) in zip(results[1], results[0], strict=True):
        assert tokens == expected
        assert len(tokens) == 12
        np.testing.assert_allclose(logp, expected_logp, atol=1e-4)
