"""The plan's state bytes are what an actor has allocated after an update, to the byte, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config.models import OptimizerSettings
from tests.dist import policy_batch
from tests.dist.launch import launch
from tests.tiny_models import write_tiny_model

TIED = {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "tied": ("qwen3", TIED),
    # Sizes that no alignment divides.
    "odd": ("qwen3", {"vocab_size": 97, "num_key_value_heads": 1, "intermediate_size": 50}),
    "moe": ("qwen3_moe", {}),
    "v3": ("deepseek_v3", {}),
}
LAYOUTS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [("dense", {}), ("tied", {}), ("moe", {}), ("v3", {})],
    2: [
        ("odd", {}),
        ("odd", {"tp": 2}),
        ("tied", {"pp": 2}),
        ("dense", {"pp": 2, "vpp": 2}),
        ("moe", {"ep": 2}),
        ("moe", {"tp": 2}),
        ("v3", {"tp": 2}),
        ("v3", {"pp": 2, "first_stage_layers": 3}),
    ],
    4: [
        ("odd", {"tp": 2, "pp": 2}),
        ("moe", {"pp": 2, "ep": 2}),
        ("moe", {"tp": 2, "ep": 4}),
        ("moe", {"ep": 2, "etp": 2, "tp": 2}),
        ("v3", {"ep": 2}),
    ],
}

WHOLE, OVERLAPPED = {"distributed_optimizer": False}, {"overlap_grad_reduce": True}
ON_HOST = {"optimizer": OptimizerSettings(cpu_offload=True)}
SETTINGS: dict[int, list[tuple[str, dict[str, Any], str, dict[str, Any]]]] = {
    2: [
        ("odd", {}, "float32", WHOLE),
        ("odd", {}, "bfloat16", WHOLE),
        ("moe", {"ep": 2}, "bfloat16", WHOLE),
        ("tied", {"pp": 2}, "bfloat16", WHOLE),
        ("odd", {}, "bfloat16", OVERLAPPED),
        ("odd", {}, "float32", ON_HOST),
        ("moe", {"ep": 2}, "bfloat16", ON_HOST),
    ],
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(write_tiny_model(root / name, kind, **changes)) for name, (kind, changes) in MODELS.items()}


@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_state_is_exact(directories: dict[str, str], num_ranks: int) -> None:
    cases = [
        (directories[model], layout, dtype, {})
        for model, layout in LAYOUTS[num_ranks]
        for dtype in ("float32", "bfloat16")
    ]
    cases += [(directories[model], layout, dtype, actor) for model, layout, dtype, actor in SETTINGS.get(num_ranks, [])]
    allocated = launch(allocate, num_ranks, cases)
    for index, (directory, layout, dtype, actor) in enumerate(cases):
        planned = plan_states(directory, layout, dtype, actor, num_ranks)
        for rank in range(num_ranks):
            assert allocated[rank][index] == planned[rank], (
                f"{Path(directory).name} {layout} {dtype} {actor} rank {rank}"
            )


def plan_states(
    directory: str, parallel: dict[str, Any], dtype: str, actor: dict[str, Any], num_ranks: int
) -> list[tuple[int, ...]]:
    from mcore_rl.megatron.layout import train_layout
    from mcore_rl.megatron.model import DTYPES
    from mcore_rl.planner.model_size import trained_model
    from mcore_rl.planner.stages import stage_parameters
    from mcore_rl.planner.state import Numerics, stage_state

    config = policy_batch.config(directory, parallel, 64)
    vars(config.actor).update(actor)
    hf_config = trained_model(config)
    layout = train_layout(config.actor.parallel, num_ranks, hf_config)
    numerics = Numerics.of(config.actor, DTYPES[dtype], fused_optimizer=False)
    states = [
        state
        for stage in range(layout.pp)
        for state in stage_state(stage_parameters(hf_config, layout, stage), layout, stage, numerics)
    ]
    return [(s.parameters, s.weights_bytes, s.gradients_bytes, s.optimizer_bytes, s.host_bytes) for s in states]


def allocate(rank: int, cases: list[tuple[str, dict[str, Any], str, dict[str, Any]]]) -> list[tuple[int, ...]]:
    return [after_an_update(rank, *case) for case in cases]


def after_an_update(
    rank: int, directory: str, parallel: dict[str, Any], dtype: str, settings: dict[str, Any]
) -> tuple[int, ...]:
    """Parameters, and bytes of the storages behind weights, gradients and optimizer state, on the device and not."""
    import torch.distributed as dist

    from mcore_rl.megatron.actor import MegatronActor
    from mcore_rl.megatron.host_optimizer import HostOptimizer
    from mcore_rl.megatron.main_params import optimizer_parts

    config = policy_batch.config(directory, parallel, 64)
    config.model.dtype = dtype
    vars(config.actor).update(settings)
    actor = MegatronActor(config, rank, dist.get_world_size(), None)
    samples = policy_batch.UPDATES[0]
    share = policy_batch.share(samples, actor.layout.coordinates(rank).dp, actor.layout.dp)
    actor.annotate([share], policy_batch.chunks())
    actor.update(share, policy_batch.chunks(), 0)
    parameters = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
    weights = storages(parameters)
    gradients = storages(parameter.main_grad for parameter in parameters)
    optimizer, host = {}, {}
    for inner in (part.optimizer for part in optimizer_parts(actor.optimizer)):
        for main in (parameter for group in inner.param_groups for parameter in group["params"]):
            moments = {name: value for name, value in inner.state[main].items() if name != "step"}
            if isinstance(inner, HostOptimizer):
                host |= storages(moments.values()) | storages([inner._host.get(id(main))])
            else:
                optimizer |= storages(moments.values())
            optimizer |= storages([main, inner.state[main].get("step")])
    # float32 models have no main parameters of their own: the optimizer's are views of the weights.
    optimizer = {key: size for key, size in optimizer.items() if key not in weights}
    held = sum(parameter.numel() for parameter in parameters)
    return held, *(sum(each.values()) for each in (weights, gradients, optimizer, host))


def storages(tensors: Any) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(tensors)}


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in values if torch.is_tensor(value))
