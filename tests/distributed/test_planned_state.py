"""The plan's state bytes equal the bytes that an actor has allocated after an update, exactly, on every rank."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config.models import LoraConfig, OptimizerSettings
from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.tiny_models import add_mtp_layer, write_tiny_model

TIED = {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "tied": ("qwen3", TIED),
    # Sizes that are not multiples of any alignment.
    "odd": ("qwen3", {"vocab_size": 97, "num_key_value_heads": 1, "intermediate_size": 50}),
    "moe": ("qwen3_moe", {}),
    # Two ranks have two experts and one.
    "three experts": ("qwen3_moe", {"num_experts": 3, "num_local_experts": 3}),
    "v3": ("deepseek_v3", {}),
    "qwen2 moe": ("qwen2_moe", {}),
    "images": ("qwen3_vl", {}),
}
LAYOUTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [("dense", {}), ("tied", {}), ("v3", {}), ("images", {})],
    2: [
        ("odd", {}),
        ("odd", {"tp": 2}),
        ("tied", {"pp": 2}),
        ("dense", {"pp": 2, "vpp": 2}),
        ("moe", {"ep": 2}),
        ("v3", {"tp": 2}),
        ("qwen2 moe", {"tp": 2}),
        ("v3", {"pp": 2, "first_stage_layers": 3}),
    ],
    4: [
        ("moe", {"pp": 2, "ep": 2}),
        ("moe", {"ep": 2, "etp": 2, "tp": 2}),
    ],
}

ADAPTERS = {"lora": LoraConfig(rank=3)}
WHOLE, OVERLAPPED = {"distributed_optimizer": False}, {"overlap_grad_reduce": True}
SHARDED, FSDP2 = {"shard_parameters": True}, {"strategy": "fsdp2"}
ON_HOST = {"optimizer": OptimizerSettings(cpu_offload=True)}
SETTINGS: dict[int, list[tuple[str, dict[str, Any], str, dict[str, Any]]]] = {
    1: [
        ("tied", {}, "float32", {}),
        ("v3", {}, "float32", {}),
        ("images", {}, "bfloat16", {"train_vision": True}),
        ("images", {}, "bfloat16", ADAPTERS),
    ],
    2: [
        ("odd", {}, "float32", {}),
        ("odd", {}, "float32", WHOLE),
        ("moe", {"ep": 2}, "bfloat16", WHOLE),
        ("odd", {}, "bfloat16", OVERLAPPED),
        ("odd", {}, "float32", ON_HOST),
        ("odd", SHARDED, "bfloat16", {}),
        ("moe", SHARDED, "float16", {}),
        ("odd", FSDP2, "bfloat16", {}),
        ("tied", FSDP2, "float32", {}),
        ("three experts", FSDP2, "bfloat16", {}),
        ("v3", FSDP2, "float32", {}),
        ("moe", {"ep": 2, **SHARDED}, "float32", {}),
        ("odd", {"tp": 2}, "float32", ADAPTERS),
        ("odd", {}, "bfloat16", ADAPTERS | OVERLAPPED),
        ("moe", {"ep": 2}, "bfloat16", ADAPTERS | ON_HOST),
        ("moe", SHARDED, "bfloat16", ADAPTERS),
        ("odd", FSDP2, "bfloat16", ADAPTERS),
        ("three experts", FSDP2, "float32", ADAPTERS),
        ("v3", FSDP2, "bfloat16", ADAPTERS),
        # Megatron's fused projections would have padding rows for k and gate.
        ("tied", FSDP2, "float32", {"lora": LoraConfig(rank=3, target_modules=["q_proj", "v_proj", "up_proj"])}),
        ("v3", {"tp": 2}, "bfloat16", ADAPTERS | {"lora": LoraConfig(rank=3, target_modules=["kv_b_proj", "up_proj"])}),
    ],
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(write_tiny_model(root / name, kind, **changes)) for name, (kind, changes) in MODELS.items()}


@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_planned_state_equals_allocated_bytes(directories: dict[str, str], num_ranks: int) -> None:
    cases = [(directories[model], layout, "bfloat16", {}) for model, layout in LAYOUTS[num_ranks]]
    cases += [(directories[model], layout, dtype, actor) for model, layout, dtype, actor in SETTINGS.get(num_ranks, [])]
    allocated = launch(allocate, num_ranks, cases)
    for index, (directory, layout, dtype, actor) in enumerate(cases):
        planned = plan_states(directory, layout, dtype, actor, num_ranks)
        for rank in range(num_ranks):
            assert allocated[rank][index] == planned[rank], (
                f"{Path(directory).name} {layout} {dtype} {actor} rank {rank}"
            )


def test_planned_layers_are_the_modules_that_shards_gather(tmp_path: Path) -> None:
    """Multi-token prediction has a transformer layer, and parameters outside of it."""
    from mcore_rl.config.roles import POLICY
    from mcore_rl.megatron.model.output import PolicyModel
    from mcore_rl.megatron.model.sharded import meta_model
    from mcore_rl.planner.stages import stage_parameters
    from model_converters.mapping.layout import TrainLayout

    directory, layout = write_tiny_model(tmp_path, "deepseek_v3"), TrainLayout(world_size=1)
    add_mtp_layer(directory)
    hf_config = json.loads((directory / "config.json").read_text())
    with meta_model(hf_config, layout, 0, PolicyModel, names=POLICY) as [model]:
        layers = [pair for pair in model.named_modules() if type(pair[1]).__name__ == "TransformerLayer"]
        sizes = {f"{name}.": sum(each.numel() for each in layer.parameters()) for name, layer in layers}
    [parameters] = stage_parameters(hf_config, layout, 0)
    planned = Counter[str]()
    for parameter in parameters:
        planned[parameter.layer] += parameter.elements
    assert planned.pop("") > 0
    assert planned == sizes


ROLES = [
    ("dense", {}, "float32"),
    ("dense", {}, "bfloat16"),
    ("tied", {"pp": 2}, "bfloat16"),
    ("moe", {"ep": 2}, "bfloat16"),
    ("odd", {"tp": 2}, "float32"),
]


def test_planned_state_of_critic_and_reward_model_is_exact(directories: dict[str, str]) -> None:
    from mcore_rl.config.roles import ModelRole
    from mcore_rl.planner.colocated import value_model_ranks

    cases = [(directories[model], layout, dtype) for model, layout, dtype in ROLES]
    held = launch(role_bytes, 2, cases)
    for index, (directory, parallel, dtype) in enumerate(cases):
        config = role_config(directory, parallel, dtype)
        critic, model = (
            ModelRole.critic(config.critic, config.model),
            ModelRole.reward_model(config.reward_model, config.model),
        )
        config.actor.num_ranks = 2
        trained = value_model_ranks(critic, config, trained=True, cuda=False)
        frozen = value_model_ranks(model, config, trained=False, cuda=False)
        planned = [(trained[rank].resident, frozen[rank].resident) for rank in range(2)]
        assert [ranks[index] for ranks in held] == planned, f"{Path(directory).name} {parallel}"
        assert all(rank.working > rank.resident for rank in (*trained, *frozen))


def role_config(directory: str, parallel: dict[str, Any], dtype: str) -> Any:
    from mcore_rl.config.models import ParallelConfig

    config = policy_batch.config(directory, {}, 64)
    config.model.dtype = dtype
    for section in (config.critic, config.reward_model):
        section.hf_path, section.parallel = directory, ParallelConfig(**parallel)
    return config


def role_bytes(rank: int, cases: list[tuple[str, dict[str, Any], str]]) -> list[tuple[int, int]]:
    """Bytes of a critic after an update, and of a frozen model of the same kind."""
    from mcore_rl.config.roles import ModelRole
    from mcore_rl.megatron.model.model import build_model
    from mcore_rl.megatron.model.value_model import ValueModel
    from mcore_rl.megatron.optim.optimizer import in_16_bits
    from mcore_rl.megatron.roles.critic import MegatronCritic
    from mcore_rl.resolved.model import ResolvedModel

    found = []
    for case in cases:
        config = role_config(*case)
        critic = MegatronCritic(config, rank, 2, None)
        batch = critic.values(policy_batch.shares(critic)[:1], policy_batch.chunks())
        critic.update(batch, 0, {sample: own + 1 for sample, own in batch.values.items()})
        _, *sizes = allocated(critic.ddp, critic.optimizer)
        role = ModelRole.reward_model(config.reward_model, config.model)
        chunks = build_model(ResolvedModel(role, critic.hf_config, critic.layout), kind=ValueModel)
        bare = [in_16_bits(chunk) if chunk.config.bf16 else chunk for chunk in chunks]
        frozen = sum(tensor.nbytes for chunk in bare for tensor in chunk.parameters())
        found.append((sum(sizes), frozen))
    return found


def plan_states(
    directory: str, parallel: dict[str, Any], dtype: str, actor: dict[str, Any], num_ranks: int
) -> list[tuple[int, ...]]:
    from mcore_rl.config.roles import ModelRole
    from mcore_rl.megatron.model.model import DTYPES
    from mcore_rl.planner.layers.execution import Execution
    from mcore_rl.planner.stages import rank_states, stage_parameters
    from mcore_rl.resolved.layout import role_layout
    from mcore_rl.resolved.model import policy_config

    config = policy_batch.config(directory, parallel, 64)
    vars(config.actor).update(actor)
    role = ModelRole.policy(config.actor, config.model)
    hf_config, _ = policy_config(role)
    layout = role_layout(role, num_ranks, hf_config)
    run = Execution(
        config.actor, layout, DTYPES[dtype].itemsize, fused=False, cuda=False, imbalance=1.0, square_length=0
    )
    states = [
        state
        for stage in range(layout.pp)
        for state in rank_states(
            stage_parameters(hf_config, layout, stage, lora=config.actor.lora, train_vision=config.actor.train_vision),
            stage,
            run,
        )
    ]
    return [(s.parameters, s.weights_bytes, s.gradients_bytes, s.optimizer_bytes, s.host_bytes) for s in states]


def allocate(rank: int, cases: list[tuple[str, dict[str, Any], str, dict[str, Any]]]) -> list[tuple[int, ...]]:
    return [after_an_update(*case) for case in cases]


def after_an_update(directory: str, parallel: dict[str, Any], dtype: str, settings: dict[str, Any]) -> tuple[int, ...]:
    """Number of parameters, and bytes of the storages of weights, gradients and optimizer state, on the device and off
    it."""
    config = policy_batch.config(directory, parallel, 64)
    config.model.dtype = dtype
    vars(config.actor).update(settings)
    if dtype == "float16":
        # Megatron's first scale would overflow, and a skipped update creates no moments.
        config.actor.optimizer.loss_scale.initial = 2.0**16
    actor = policy_batch.build_actor(config)
    policy_batch.update_once(actor)
    if actor.layout.shard_parameters:
        # Gradients of shards exist during an update only.
        actor.accumulate_gradients(actor.recompute_logp(policy_batch.shares(actor)[:1], policy_batch.chunks())[0], 0)
    return allocated(actor.ddp, actor.optimizer)


def allocated(chunks: Any, optimizer_of_all: Any) -> tuple[int, ...]:
    from mcore_rl.megatron.model.shards import local_shard
    from mcore_rl.megatron.optim.host_optimizer import HostOptimizer
    from mcore_rl.megatron.optim.main_params import optimizer_parts

    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    # In a LoRA run the frozen weights may be sharded.
    parameters = [whole if (shard := local_shard(whole)) is None else shard for whole in parameters]
    weights = storages(parameters)
    gradients = storages(parameter.main_grad for parameter in parameters if parameter.requires_grad)
    optimizer, host = {}, {}
    for inner in (part.optimizer for part in optimizer_parts(optimizer_of_all)):
        for main in (parameter for group in inner.param_groups for parameter in group["params"]):
            moments = {name: value for name, value in inner.state[main].items() if name != "step"}
            if isinstance(inner, HostOptimizer):
                host |= storages(moments.values()) | storages([inner._host.get(id(main))])
            else:
                optimizer |= storages(moments.values())
            optimizer |= storages([main, inner.state[main].get("step")])
    # float32 models have no separate main parameters: the optimizer's parameters are views of the weights.
    optimizer = {key: size for key, size in optimizer.items() if key not in weights}
    held = sum(parameter.numel() for parameter in parameters)
    return held, *(sum(each.values()) for each in (weights, gradients, optimizer, host))


def storages(tensors: Any) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(tensors)}


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in values if torch.is_tensor(value))
