"""Quantisation-aware training: passes equal those of a model with dequantised experts, bit for bit, and weights stay
unrounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize

from mcore_rl.config.models import LoraConfig
from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.tiny_models import write_tiny_model

GROUP = 32
SIZES = {"moe_intermediate_size": 64, "num_experts": 4, "num_hidden_layers": 2}
# layout of two ranks, dtype, recomputation, LoRA
CASES: dict[str, tuple[dict[str, Any], str, str, bool]] = {
    "whole experts": ({"ep": 2}, "bfloat16", "none", False),
    "slices of experts": ({"tp": 2, "etp": 2}, "float32", "none", False),
    "sharded": ({"shard_parameters": True}, "bfloat16", "full", False),
    "transformers": ({"strategy": "fsdp2"}, "bfloat16", "full", False),
    "transformers, adapters": ({"strategy": "fsdp2"}, "bfloat16", "none", True),
    "adapters": ({"ep": 2}, "bfloat16", "selective", True),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, "qwen3_moe", std=0.06, **SIZES)
    return launch(train_all, 2, str(directory))


def train_all(rank: int, directory: str) -> dict[str, Any]:
    return {case: _train(directory, *CASES[case]) for case in CASES}


OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def update_twice(rank: int, directory: str) -> list[list[Any]]:
    """Return the weights after two updates, the second of which begins before parameters are gathered if it can."""
    found = []
    for settings in ({}, OVERLAPPED):
        config = policy_batch.config(directory, {"tp": 2, "etp": 1}, 200)
        config.model.dtype, config.actor.quantization_aware = "bfloat16", GROUP
        config.actor.optimizer.lr = 1e-2
        vars(config.actor).update(settings)
        actor = policy_batch.build_actor(config)
        for index in (0, 1):
            policy_batch.update_once(actor, index)
        actor.gather_parameters()
        found.append(policy_batch.hf_pieces(actor))
    return found


def _train(directory: str, parallel: dict[str, Any], dtype: str, recompute: str, lora: bool) -> dict[str, Any]:
    """Return log-probabilities and gradients of a rounding actor, and of another one with dequantised experts."""
    config = policy_batch.config(directory, parallel, 200)
    config.model.dtype, config.actor.recompute = dtype, recompute
    if lora:
        config.actor.lora = LoraConfig(4, 8.0)
    plain = policy_batch.build_actor(config)
    found: dict[str, Any] = {"names": sorted(plain.tensors()), "unrounded": _pass(plain)}
    _dequantise_experts(plain.tensors())
    found["expected"] = _pass(plain)
    config.actor.quantization_aware = GROUP
    actor = policy_batch.build_actor(config)
    before = policy_batch.hf_pieces(actor)
    found["rounding"] = _pass(actor)
    found["unchanged"] = _equal(before, policy_batch.hf_pieces(actor)) and sorted(actor.tensors()) == found["names"]
    policy_batch.update_once(actor)
    actor.gather_parameters()
    found["trained"] = not _equal(before, policy_batch.hf_pieces(actor))
    return found


def _pass(actor: Any) -> dict[str, Any]:
    batch, _ = actor.recompute_logp([policy_batch.shares(actor)[0]], policy_batch.chunks())
    with policy_batch.complete_gradients(actor):
        actor.accumulate_gradients(batch, 0)
    gradients = {name: p.main_grad.numpy().copy() for chunk in actor.ddp for name, p in chunk.named_parameters()
                 if p.requires_grad}  # fmt: skip
    return {"logp": {s: each.numpy().copy() for s, each in batch.old_logp.items()}, "gradients": gradients}


@torch.no_grad()
def _dequantise_experts(tensors: Any) -> None:
    """Round the experts' weights in place, with compressed-tensors."""
    options = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    for name, tensor in tensors.items():
        if ".mlp.experts." in name and tensor.numel():
            values = tensor.bfloat16().float()
            scales = (values.unflatten(1, (-1, GROUP)).abs().amax(-1) / 7).bfloat16().float()
            # bfloat16 values of the products, as engines use them.
            tensor.copy_(fake_quantize(values, scales, None, QuantizationArgs(**options)).bfloat16())


def _equal(first: list[Any], second: list[Any]) -> bool:
    return all((a[-1] == b[-1]).all() for a, b in zip(first, second, strict=True))


def _differing(first: dict[Any, Any], second: dict[Any, Any]) -> set[Any]:
    return {name for name in first.keys() | second.keys() if (first[name] != second[name]).any()}


@pytest.mark.parametrize("case", CASES)
def test_rounding_passes_equal_those_with_dequantised_weights(case: str, results: Any) -> None:
    for rank in results:
        found, expected, unrounded = (rank[case][key] for key in ("rounding", "expected", "unrounded"))
        for key in ("logp", "gradients"):
            assert _differing(found[key], expected[key]) == set()
            assert not found[key] or _differing(found[key], unrounded[key])


@pytest.mark.parametrize("case", CASES)
def test_rounding_keeps_weights_and_their_names(case: str, results: Any) -> None:
    for rank in results:
        assert rank[case]["unchanged"]
        assert rank[case]["trained"]


def test_rounding_begins_after_the_gathering_of_weights(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen3_moe", std=0.06, **SIZES)
    for at_once, overlapped in launch(update_twice, 2, str(directory)):
        assert _equal(at_once, overlapped)
