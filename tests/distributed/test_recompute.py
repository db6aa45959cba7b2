"""Recomputed activations give bitwise equal gradients, and Megatron accepts every chosen argument."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.config.models import ActorConfig
from tests.distributed import policy_batch
from tests.distributed.launch import SIMULATED, launch
from tests.tiny_models import write_tiny_model

FULL = {"recompute": "full"}
# TransformerEngine fuses the norms of a dense model into other layers, so there is nothing to recompute.
NORMS = [] if SIMULATED else ["layernorm"]


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute": "selective", "recompute_modules": list(modules)}


MODES: dict[str, list[dict[str, Any]]] = {
    "qwen3": [
        FULL,
        FULL | {"recompute_layers": 2},
        _selective("core_attn"),
        _selective("mlp"),
        *(_selective(norms) for norms in NORMS),
        _selective("core_attn", "mlp", *NORMS),
    ],
    "deepseek_v3": [
        FULL,
        _selective("mla_up_proj"),
        _selective("moe"),
        _selective("shared_experts"),
        _selective("mla_up_proj", "shared_experts", "mlp", "layernorm"),
    ],
    "gpt_oss": [
        FULL,
        _selective("core_attn", "moe"),
    ],
    "gemma3_text": [FULL, _selective("mlp", *NORMS)],
    # Without shared_experts: the gradients of their gate and of their input are then added in another order.
    "qwen3_next": [FULL, _selective("core_attn", "moe", "layernorm")],
}
CASES = [(kind, index) for kind, modes in MODES.items() for index in range(len(modes))]


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Gradients by model, without recomputation and in every mode, each with the number of elements saved for the
    backward pass."""
    root = tmp_path_factory.mktemp("models")
    directories = {kind: str(write_tiny_model(root / kind, kind)) for kind in MODES}
    [found] = launch(_gradients, 1, directories)
    return found


def _gradients(rank: int, directories: dict[str, str]) -> dict[str, list[tuple[dict[str, Any], int]]]:
    found: dict[str, list[tuple[dict[str, Any], int]]] = {}
    for kind, directory in directories.items():
        found[kind] = []
        for mode in ({}, *MODES[kind]):
            config = policy_batch.config(directory, {}, 24)
            for name, value in mode.items():
                setattr(config.actor, name, value)
            actor = policy_batch.build_actor(config)
            batch, _ = actor.recompute_logp(policy_batch.shares(actor)[:1], policy_batch.chunks())
            saved = 0

            def count(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal saved
                saved += tensor.numel()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                actor.accumulate_gradients(batch, 0)
            named = actor.chunks[0].named_parameters()
            found[kind].append(({name: p.main_grad.numpy().copy() for name, p in named}, saved))
    return found


@pytest.mark.parametrize(("kind", "index"), CASES, ids=[f"{kind} {MODES[kind][index]}" for kind, index in CASES])
def test_recompute_gives_bitwise_equal_gradients(kind: str, index: int, gradients: dict[str, Any]) -> None:
    (plain, saved), *modes = gradients[kind]
    recomputed, saved_then = modes[index]
    assert recomputed.keys() == plain.keys()
    assert [name for name in plain if not np.array_equal(plain[name], recomputed[name])] == []
    # Recomputation took place: other tensors were saved for the backward pass.
    assert saved_then != saved


def test_megatron_accepts_all_arguments_for_fully_equipped_gpu() -> None:
    from mcore_rl.megatron import cpu

    cpu.install()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mcore_rl.resolved.implementation import RECIPES, USUAL, choose
    from mcore_rl.resolved.installed import Installed

    everything = Installed(True, (10, 0), "2.8.0", flash_attention="2.8.3", gradient_fusion=True, deep_ep=True)
    known = {field.name for field in fields(TransformerConfig)}
    for recipe in RECIPES:
        role = replace(USUAL.role, section=ActorConfig(fp8=recipe))
        request = replace(USUAL, role=role)
        arguments = choose(everything, request).arguments()
        assert set(arguments) <= known
        # Only arguments that need TransformerEngine are left out.
        for name in ("apply_rope_fusion", "moe_permute_fusion"):
            arguments.pop(name)
        config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, bf16=True, **arguments)
        assert config.fp8_recipe == recipe
