"""Real Megatron ranks send FP8 codes and scales of their current weights: after an update, merged with adapters, from
shards of parameters, in layouts that divide blocks. They equal those of the exported tensors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mcore_rl.config.models import LoraConfig
from mcore_rl.weights.connection import Connection, TrainerSetup, connect_engine_rank
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.transports.arrival import Rendezvous
from mcore_rl.weights.transports.hosts import this_host
from mcore_rl.weights.transports.link import open_store
from mcore_rl.weights.transports.topology import Endpoint, Topology
from mcore_rl.weights.verify import Comparison, compare
from model_converters.families import family_for
from model_converters.hf.quant import SCALE_SUFFIX, quantise
from model_converters.mapping.table import bind
from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.tiny_models import write_tiny_model

SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": SIZES,
    "qwen3_moe": {**SIZES, "moe_intermediate_size": 96, "num_experts": 4},
}
# model, layout of two ranks, dtype, LoRA
CASES: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "tp": ("qwen2", {"tp": 2}, "float32", False),
    "adapters": ("qwen2", {"tp": 2}, "bfloat16", True),
    "sharded": ("qwen2", {"shard_parameters": True}, "bfloat16", False),
    "experts": ("qwen3_moe", {"tp": 2, "etp": 2}, "bfloat16", False),
    "transformers": ("qwen3_moe", {"strategy": "fsdp2"}, "bfloat16", False),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("models")
    for kind, changes in MODELS.items():
        write_tiny_model(root / kind, kind, **changes)
    return launch(sync_all, 2, str(root))


@pytest.mark.parametrize("case", CASES)
def test_quantised_sync_of_megatron_ranks_equals_quantised_export(case: str, results: Any) -> None:
    _, _, dtype, _ = CASES[case]
    whole = policy_batch.assemble([rank[case]["pieces"] for rank in results])
    arrived, quantised, groups = (results[0][case][key] for key in ("arrived", "quantised", "groups"))
    assert groups[0] == (0, 1), "a layout that divides blocks between the ranks"
    assert quantised < arrived.keys() == whole.keys() | {name + SCALE_SUFFIX for name in quantised}
    for name, tensor in whole.items():
        expected = [tensor.to(getattr(torch, dtype))]
        if name in quantised:
            expected = list(quantise(expected[0]))
        for found, each in zip((arrived[name], arrived.get(name + SCALE_SUFFIX)), expected, strict=False):
            assert (found == each.contiguous().view(torch.uint8).numpy()).all(), name


@pytest.mark.parametrize("case", CASES)
def test_digests_of_megatron_ranks_equal_what_arrived(case: str, results: Any) -> None:
    assert results[0][case]["compared"] == Comparison()


def sync_all(rank: int, root: str) -> dict[str, Any]:
    return {case: _sync(rank, root, *CASES[case]) for case in CASES}


def _sync(rank: int, root: str, kind: str, parallel: dict[str, Any], dtype: str, lora: bool) -> dict[str, Any]:
    """Update the weights once and send them to an engine rank, a thread of rank 0."""
    config = policy_batch.config(Path(root) / kind, parallel, 24)
    config.model.dtype, config.actor.optimizer.lr = dtype, 1e-2
    if lora:
        config.actor.lora = LoraConfig(4, 8.0)
    actor = policy_batch.build_actor(config)
    policy_batch.update_once(actor)
    actor.gather_parameters()
    here = Endpoint(this_host(), "127.0.0.1")
    plan = replace(actor.sync_plan(EngineLayout(), Topology((here, here), (here,), 1), 200_000, 2), quantization="fp8")
    setup, store = TrainerSetup(plan, rank), open_store("127.0.0.1") if rank == 0 else None
    shared = [(setup.create_buffers(), store.port)] if store is not None else [None]
    dist.broadcast_object_list(shared)
    assert shared[0] is not None
    segments, port = shared[0]
    connection = Connection(plan, Rendezvous("127.0.0.1", port, 0), segments, 60.0)
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(_receive, connection, plan.shard_map.boxes(0)) if rank == 0 else None
        sender = setup.connect(connection)
        dist.barrier()
        setup.unlink()
        sender.send(actor.tensors())
        sender.send_digests(actor.tensors())
        found: dict[str, Any] = {"pieces": policy_batch.hf_pieces(actor)}
        if engine is not None:
            found["arrived"], found["compared"] = engine.result()
            rows = bind(family_for(plan.hf_config).rows(plan.hf_config), plan.hf_config, plan.dtype)
            found["quantised"] = {name for bound in rows if bound.row.fp8 for name in bound.hf}
            found["groups"] = [group.ranks for group in plan.divided_blocks(rank)]
    setup.disconnect()
    dist.barrier()
    setup.close()
    return found


def _receive(connection: Connection, boxes: dict[str, Any]) -> tuple[dict[str, np.ndarray], Comparison]:
    """Receive an update and its digests. Returns the bytes of each tensor, and the comparison."""
    receiver = connect_engine_rank(connection, 0)
    tensors: dict[str, torch.Tensor] = {}

    def put(name: str, start: tuple[int, ...], box: torch.Tensor) -> None:
        target = tensors.setdefault(name, torch.zeros(boxes[name][0][1], dtype=box.dtype))
        target[tuple(slice(a, a + n) for a, n in zip(start, box.shape, strict=True))] = box

    receiver.begin()
    for sync_round in range(receiver.num_rounds):
        receiver.receive(sync_round, put)
    receiver.finish()
    compared = compare(receiver.digests(), tensors.items(), boxes)
    receiver.close()
    return {name: tensor.view(torch.uint8).numpy() for name, tensor in tensors.items()}, compared
