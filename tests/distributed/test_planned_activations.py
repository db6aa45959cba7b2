"""The plan's table of saved tensors compared with the tensors that autograd saves in a forward pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import policy_batch
from tests.distributed.built import build
from tests.distributed.launch import launch
from tests.tiny_models import tiny_fields

TOLERANCE = 0.10
LENGTHS = [150, 234]
WIDE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
SIZES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "qwen3": WIDE,
    "qwen3_moe": WIDE,
    "deepseek_v3": WIDE,
    "glm_moe_dsa": WIDE,
    "minimax_m2": WIDE,
    "ernie4_5_moe": WIDE,
    "gpt_oss": WIDE,
    "gemma3_text": WIDE,
    "qwen3_5_text": WIDE,
    "qwen3_next": WIDE,
    "qwen2_moe": WIDE | {"shared_expert_intermediate_size": 80},
}
CASES: dict[int, list[tuple[str, dict[str, int], str, list[str]]]] = {
    1: [
        ("llama", {}, "none", []),
        ("qwen3", {}, "none", []),
        ("qwen3", {}, "selective", ["core_attn"]),
        ("qwen3", {}, "selective", ["mlp"]),
        ("qwen3", {}, "selective", ["layernorm"]),
        ("qwen3", {}, "full", []),
        ("llama", {"strategy": "fsdp2"}, "none", []),
        ("qwen3", {"strategy": "fsdp2"}, "none", []),
        ("qwen3", {"strategy": "fsdp2"}, "full", []),
        ("qwen3_moe", {"strategy": "fsdp2"}, "none", []),
        ("deepseek_v3", {"strategy": "fsdp2"}, "none", []),
        ("qwen3_moe", {}, "none", []),
        ("qwen3_moe", {}, "selective", ["moe"]),
        ("qwen3_moe", {}, "full", []),
        ("qwen2_moe", {}, "none", []),
        ("qwen2_moe", {}, "selective", ["shared_experts"]),
        ("qwen2_moe", {"strategy": "fsdp2"}, "none", []),
        ("deepseek_v3", {}, "none", []),
        ("deepseek_v3", {}, "selective", ["core_attn"]),
        ("deepseek_v3", {}, "selective", ["shared_experts"]),
        ("deepseek_v3", {}, "selective", ["mla_up_proj"]),
        ("deepseek_v3", {}, "full", []),
        ("glm_moe_dsa", {}, "none", []),
        ("minimax_m2", {}, "none", []),
        ("minimax_m2", {"strategy": "fsdp2"}, "none", []),
        ("ernie4_5_moe", {}, "none", []),
        ("ernie4_5_moe", {"strategy": "fsdp2"}, "none", []),
        ("gpt_oss", {}, "none", []),
        ("gpt_oss", {}, "selective", ["core_attn"]),
        ("gpt_oss", {}, "selective", ["moe"]),
        ("gemma3_text", {}, "none", []),
        ("gemma3_text", {"strategy": "fsdp2"}, "none", []),
        ("qwen3_5_text", {}, "none", []),
        ("qwen3_next", {}, "selective", ["shared_experts"]),
        ("qwen3_next", {}, "full", []),
    ],
    2: [
        ("qwen3", {"tp": 2}, "none", []),
        ("qwen3_moe", {"tp": 2}, "none", []),
        ("qwen3_moe", {"ep": 2}, "none", []),
        ("qwen2_moe", {"tp": 2}, "none", []),
        ("deepseek_v3", {"tp": 2}, "none", []),
        ("minimax_m2", {"tp": 2}, "none", []),
        ("gpt_oss", {"tp": 2}, "none", []),
        ("qwen3_next", {"tp": 2}, "none", []),
    ],
}


@pytest.mark.parametrize("num_ranks", CASES)
def test_planned_saved_tensors_equal_autograd(num_ranks: int) -> None:
    cases = CASES[num_ranks]
    measured = launch(measure, num_ranks, cases)
    for index, case in enumerate(cases):
        # Ranks of an expert-parallel group get different numbers of tokens; the plan contains their mean.
        mean = sum(rank[index] for rank in measured) / num_ranks
        assert planned(num_ranks, *case) == pytest.approx(mean, rel=TOLERANCE), case


def fields_of(kind: str) -> dict[str, Any]:
    return tiny_fields(kind, max_position_embeddings=1024, **SIZES[kind])


def planned(num_ranks: int, kind: str, parallel: dict[str, int], recompute: str, modules: list[str]) -> float:
    from mcore_rl.config.roles import ModelRole
    from mcore_rl.config.schema import Config
    from mcore_rl.planner.activations import chunk_activations
    from mcore_rl.planner.layers.execution import Execution
    from mcore_rl.resolved.layout import model_arguments, role_layout

    config = Config()
    policy_batch.set_layout(config.actor, parallel)
    config.actor.recompute, config.actor.recompute_modules = recompute, modules
    hf_config = fields_of(kind)
    layout = role_layout(ModelRole.policy(config.actor, config.model), num_ranks, hf_config)
    square = sum(length * length for length in LENGTHS) / sum(LENGTHS)
    run = Execution(config.actor, layout, 4, fused=False, cuda=False, imbalance=1.0, square_length=square)
    layers = range(hf_config["num_hidden_layers"])
    return chunk_activations(model_arguments(hf_config), layers, run, last=True).total * sum(LENGTHS)


def measure(rank: int, cases: list[tuple[str, dict[str, int], str, list[str]]]) -> list[float]:
    return [saved_bytes(*case) for case in cases]


def _use_rows(chunk: Any) -> None:
    """Make the rows that this rank keeps the parameters of a model that is not wrapped."""
    from mcore_rl.megatron.model.shards import local_shard

    for module in chunk.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, local_shard(parameter))


def saved_bytes(kind: str, parallel: dict[str, int], recompute: str, modules: list[str]) -> float:
    """Bytes of the storages saved by a forward pass of one packed row, without weights."""
    import torch

    from mcore_rl.config.models import ActorConfig
    from mcore_rl.megatron.model.attention.packed import pack_sequences
    from mcore_rl.megatron.optim.optimizer import wrap_chunks

    hf_config = fields_of(kind)
    actor = ActorConfig(recompute=recompute, recompute_modules=modules)
    policy_batch.set_layout(actor, parallel)
    (chunk,), _ = build(hf_config, vars(actor.parallel), actor=actor, random_init=True)
    if chunk.has_hf_names:
        # Gathered copies of sharded parameters would count as activations. The rows of the only rank are whole.
        _use_rows(chunk)
        wrapped = chunk
    else:
        [wrapped] = wrap_chunks([chunk], actor)
    weights = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            found[address] = tensor  # keep alive, so that no address is reused
        return tensor

    tokens = torch.randint(0, hf_config["vocab_size"], (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = wrapped(tokens, None, None, packed_seq_params=pack_sequences(LENGTHS))
    del output
    return float(sum(tensor.untyped_storage().nbytes() for tensor in found.values()))
