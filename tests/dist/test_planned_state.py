"""The plan's state bytes are what an actor has allocated after an update, to the byte, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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
SETTINGS: dict[int, list[tuple[str, dict[str, Any], str, dict[str, bool]]]] = {
    2: [
        ("odd", {}, "float32", WHOLE),
        ("odd", {}, "bfloat16", WHOLE),
        ("moe", {"ep": 2}, "bfloat16", WHOLE),
        ("tied", {"pp": 2}, "bfloat16", WHOLE),
        ("odd", {}, "bfloat16", OVERLAPPED),
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
    directory: str, parallel: dict[str, Any], dtype: str, actor: dict[str, bool], num_ranks: int
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
    return [(s.parameters, s.weights_bytes, s.gradients_bytes, s.optimizer_bytes) for s in states]


def allocate(rank: int, cases: list[tuple[str, dict[str, Any], str, dict[str, bool]]]) -> list[tuple[int, ...]]:
    return [after_an_update(rank, *case) for case in cases]


def after_an_update(
    rank: int, directory: str, parallel: dict[str, Any], dtype: str, settings: dict[str, bool]
) -> tuple[int, ...]:
    """Parameters, and bytes of the storages behind weights, gradients and optimizer state."""
    import torch.distributed as dist

    from mcore_rl.megatron.actor import MegatronActor
    from mcore_rl.megatron.optimizer import _torch_optimizers

    config = policy_batch.config(directory, parallel, 64)
    config.model.dtype = dtype
    vars(config.actor).update(settings)
    actor = MegatronActor(config, rank, dist.get_world_size(), None)
    samples = policy_batch.UPDATES[0]
    share = policy_batch.share(samples, actor.layout.coordinates(rank).dp, actor.layout.dp)
    actor.annotate([share], policy_batch.chunks())
    actor.update(share, policy_batch.chunks(), 0)
    parameters = [parameter for chunk in actor.chunks for parameter in chunk.parameters()]
    state = [
        value
        for inner in _torch_optimizers(actor.optimizer)
        for parameter in (p for group in inner.param_groups for p in group["params"])
        for value in (parameter, *inner.state[parameter].values())
    ]
    weights = storages(parameters)
    gradients = storages(parameter.main_grad for parameter in parameters)
    # float32 models have no main parameters of their own: the optimizer's are views of the weights.
    optimizer = {key: size for key, size in storages(state).items() if key not in weights}
    held = sum(parameter.numel() for parameter in parameters)
    return held, sum(weights.values()), sum(gradients.values()), sum(optimizer.values())


def storages(tensors: Any) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(tensors)}


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in values if torch.is_tensor(value))
