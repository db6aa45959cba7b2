"""Sharded parameters (parallel.shard_parameters) give the bits of DistributedDataParallel on two ranks: losses,
reference log-probabilities, gradients and weights of three updates, while shards are offloaded between updates.

Two conditions make the sums of both equal. Each rank has one micro-batch, because DistributedDataParallel adds
micro-batches before it adds ranks. No gradient is clipped, because the two add the squares of the norm in other orders.
test_invariance compares updates without them, in other layouts, with those of one rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.errors import OffloadedError
from mcore_rl.types import merge_metrics
from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.distributed.two_updates import make_config
from tests.tiny_models import add_mtp_layer, write_tiny_model

SHARDED = {"shard_parameters": True}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "tied": ("qwen2", {}, {}),
    "experts": ("qwen3_moe", {"ep": 2}, {"actor.recompute": "selective"}),
    "linear attention": ("qwen3_5_text", {}, {"actor.recompute": "full"}),
    "mtp": ("deepseek_v3", {"cp": 2}, {"actor.mtp_loss_coefficient": 0.3}),
    "bfloat16": ("qwen3_moe", {}, {"model.dtype": "bfloat16", "actor.recompute": "full"}),
}
"""Model, layout and settings of the policy."""


def _config(directory: str, parallel: dict[str, Any], settings: dict[str, Any]) -> Any:
    config = make_config(directory, parallel)
    config.actor.tokens_per_microbatch, config.actor.optimizer.clip_grad = 200, 1e9
    config.algorithm.kl.in_loss = 0.1
    for key, value in settings.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    return config


def _compare(rank: int, directories: dict[str, str]) -> dict[str, Any]:
    """Train every case both ways on this rank."""
    return {
        name: [
            _train(_config(directories[kind], parallel | extra, settings), offloads=bool(extra))
            for extra in ({}, SHARDED)
        ]
        for name, (kind, parallel, settings) in CASES.items()
    }


def _train(config: Any, *, offloads: bool) -> dict[str, Any]:
    from mcore_rl.megatron.model.names import canonical_tensors

    config.actor.offload.params = config.actor.offload.optimizer = offloads
    actor = policy_batch.build_actor(config)
    shares, chunks = policy_batch.shares(actor), policy_batch.chunks()
    found: dict[str, Any] = {"marks": _marks(actor), "losses": [], "norms": [], "released": []}
    batch = actor.reference_logp(actor.recompute_logp([*shares, shares[0]], chunks)[0])
    with policy_batch.complete_gradients(actor):
        actor.accumulate_gradients(batch, 0)
    found["gradients"] = policy_batch.gradient_pieces(actor)
    for index in range(3):
        found["released"].append(actor.memory.offload())
        if offloads:
            with pytest.raises(OffloadedError, match=r"actor\.offload\.params"):
                canonical_tensors(actor.chunks)
        metrics = actor.update(batch, index)
        found["losses"].append(metrics["actor/loss"].total)
        found["norms"].append({name: metric for name, metric in metrics.items() if "grad_norm" in name})
        actor.refresh_reference()
        batch = actor.reference_logp(batch)
    found["reference"] = {sample: logp.numpy().copy() for sample, logp in batch.ref_logp.items()}
    found["weights"] = policy_batch.hf_pieces(actor)
    actor.reference.memory.load("params")
    found["held"] = [sum(p.numel() for p in model.parameters()) for model in (*actor.ddp, *actor.reference.modules)]
    found["gradients left"] = any(hasattr(parameter, "main_grad") for parameter in actor.ddp[0].parameters())
    return found


def _marks(actor: Any) -> dict[str, Any]:
    """Attributes that Megatron sets on parameters."""
    names = ("allreduce", "tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "shared")
    return {
        name.replace("module.", ""): {mark: getattr(parameter, mark, None) for mark in names}
        for name, parameter in actor.ddp[0].named_parameters()
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of every rank by case: whole parameters, sharded parameters."""
    root = tmp_path_factory.mktemp("models")
    kinds = {kind for kind, _, _ in CASES.values()}
    directories = {kind: str(write_tiny_model(root / kind, kind)) for kind in kinds}
    add_mtp_layer(Path(directories["deepseek_v3"]))
    return launch(_compare, 2, directories)


@pytest.mark.parametrize("case", CASES)
def test_sharded_parameters_equal_replicated_bitwise(case: str, results: Any) -> None:
    for rank in results:
        whole, sharded = rank[case]
        assert sharded["losses"] == whole["losses"]
        assert sharded["reference"].keys() == whole["reference"].keys() != set()
        for sample, logp in whole["reference"].items():
            assert (sharded["reference"][sample] == logp).all()
    for what in ("gradients", "weights"):
        whole, sharded = (policy_batch.assemble([rank[case][i][what] for rank in results]) for i in range(2))
        assert sharded.keys() == whole.keys()
        assert [name for name, tensor in whole.items() if not torch.equal(sharded[name], tensor)] == []


@pytest.mark.parametrize("case", CASES)
def test_sharded_parameters_have_megatrons_marks_and_norms(case: str, results: Any) -> None:
    norms = []
    for way in range(2):
        steps = zip(*(rank[case][way]["norms"] for rank in results), strict=True)
        norms += [{name: norm.value for name, norm in merge_metrics(list(ranks)).items()} for ranks in steps]
    for replicated, sharded in zip(norms[:3], norms[3:], strict=True):
        assert sharded == pytest.approx(replicated, rel=1e-6)
    for rank in results:
        assert rank[case][1]["marks"] == rank[case][0]["marks"]


# Exported multi-token-prediction layers repeat the embedding.
@pytest.mark.parametrize("case", [case for case in CASES if case != "mtp"])
def test_sharded_parameters_use_and_release_their_part(case: str, results: Any) -> None:
    parts = [rank[case][1] for rank in results]
    weights = policy_batch.assemble([part["weights"] for part in parts])
    # Every element of policy and reference is on exactly one rank.
    total = sum(tensor.numel() for tensor in weights.values())
    assert [sum(held) for held in zip(*(part["held"] for part in parts), strict=True)] == [total, total]
    for part in parts:
        held = part["held"][0]
        # Float32 shards, and two moments after the first update.
        assert part["released"] == [4 * held, 12 * held, 12 * held]
        assert not part["gradients left"]
