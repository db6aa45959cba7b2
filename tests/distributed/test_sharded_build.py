"""Building and loading a model with sharded parameters: the same initial values as without, and no more memory than
this rank's shards and a few layers.

test_sharded_parameters compares loaded weights after updates, test_critic and test_reward_model value models.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config.models import ParallelConfig
from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.tiny_models import add_mtp_layer, write_tiny_classifier, write_tiny_model

SHARDED = {"shard_parameters": True}
INITIAL: dict[str, tuple[str, dict[str, Any], str]] = {
    "latent attention": ("deepseek_v3", {"ep": 2}, "float32"),
    "tensor parallel": ("qwen3_moe", {"tp": 2, "etp": 1}, "bfloat16"),
}
"""Models with random weights: kind, layout of two or four ranks, dtype."""
NUM_LAYERS = 24
MEASURED: dict[str, tuple[str, dict[str, Any]]] = {
    "loaded": ("policy", {"dtype": "float32"}),
    "bfloat16": ("policy", {"dtype": "bfloat16"}),
    "random": ("policy", {"random_init": True}),
    "critic": ("critic", {}),
    "reward model": ("reward_model", {}),
}
STRATEGIES = ("megatron", "fsdp2")


def _initial_values(_: int, directories: dict[str, str], case: str) -> list[Any]:
    """Return this rank's slices of the initial weights, without and with sharded parameters."""
    kind, parallel, dtype = INITIAL[case]
    found = []
    for extra in ({}, SHARDED):
        config = policy_batch.config(directories[kind], parallel | extra, 200)
        config.model.random_init, config.model.dtype = True, dtype
        config.actor.mtp_loss_coefficient = 0.3 if kind == "deepseek_v3" else 0.0
        found.append(policy_batch.hf_pieces(policy_batch.build_actor(config)))
    return found


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    found = {kind: str(write_tiny_model(root / kind, kind)) for kind in ("deepseek_v3", "qwen3_moe")}
    add_mtp_layer(Path(found["deepseek_v3"]))
    found["deep"] = str(write_tiny_model(root / "deep", "qwen3", num_hidden_layers=NUM_LAYERS))
    found["deep classifier"] = str(
        write_tiny_classifier(root / "deep_classifier", "qwen3", num_hidden_layers=NUM_LAYERS)
    )
    return found


@pytest.mark.parametrize(("case", "num_ranks"), [("latent attention", 2), ("tensor parallel", 4)])
def test_random_init_of_sharded_parameters_equals_replicated_bitwise(
    case: str, num_ranks: int, directories: dict[str, str]
) -> None:
    ranks = launch(_initial_values, num_ranks, directories, case)
    whole, sharded = (policy_batch.assemble([rank[way] for rank in ranks]) for way in range(2))
    assert sharded.keys() == whole.keys()
    assert [name for name, tensor in whole.items() if not torch.equal(sharded[name], tensor)] == []


def _measure(_: int, directories: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Build every model, and return the peak of allocated bytes and the elements of this rank's shards."""
    from torch.distributed._tools.mem_tracker import MemTracker

    measured = {}
    for strategy, (case, (role, settings)) in product(STRATEGIES, MEASURED.items()):
        if strategy == "fsdp2" and settings.get("random_init"):
            continue  # transformers draws the initial weights of the whole model
        tracker = MemTracker()
        with tracker:
            model = _build(directories, role, settings, strategy)
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        measured[f"{case}, {strategy}"] = peak, sum(p.numel() for module in model.modules for p in module.parameters())
    return measured


def _build(directories: dict[str, str], role: str, settings: dict[str, Any], strategy: str) -> Any:
    import torch.distributed as dist

    from mcore_rl.megatron.roles.critic import MegatronCritic
    from mcore_rl.megatron.roles.reward_model import MegatronRewardModel

    config = policy_batch.config(directories["deep"], SHARDED, 200)
    for name, value in settings.items():
        setattr(config.model, name, value)
    config.actor.strategy = strategy
    if role == "policy":
        return policy_batch.build_actor(config)
    section = config.critic if role == "critic" else config.reward_model
    section.parallel, section.strategy = ParallelConfig(shard_parameters=True), strategy
    section.hf_path = directories["deep classifier"] if role == "reward_model" else None
    kind = MegatronCritic if role == "critic" else MegatronRewardModel
    return kind(config, dist.get_rank(), dist.get_world_size(), None)


def test_build_and_load_need_memory_for_shards_and_three_layers(directories: dict[str, str]) -> None:
    """The whole model has 24 layers: twice the bytes of the shards. Both forms of all bfloat16 rows have 1.5 times."""
    for rank in launch(_measure, 2, directories):
        for case, (peak, held) in rank.items():
            layer = 4 * 2 * held / NUM_LAYERS
            assert 4 * held <= peak < 4 * held + 3 * layer, case
