"""A run saved in any layout resumes in any other: weights, main parameters and both Adam moments are restored bitwise,
and the next update equals that of the saving ranks.

Weights are compared by HF name, through the tables of model_converters. Optimizer state is compared by HF name too,
after Megatron has gathered it from the distributed optimizer's buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.tiny_models import add_mtp_layer, write_tiny_model

MODELS = {
    "dense": ("qwen3", {}),
    "tied": ("qwen2", {}),
    "moe": ("qwen3_moe", {}),
    "v3": ("deepseek_v3", {}),
    "glm": ("glm4_moe", {}),  # for tests/te, which uses these cases too
    "mtp": ("deepseek_v3", {"actor.mtp_loss_coefficient": 0.3}),
    "replicated": ("qwen3", {"actor.distributed_optimizer": False}),
    "replicated bf16": ("qwen3_moe", {"actor.distributed_optimizer": False, "model.dtype": "bfloat16"}),
    "dense bf16": ("qwen3", {"model.dtype": "bfloat16"}),
    "moe bf16": ("qwen3_moe", {"model.dtype": "bfloat16"}),
}


@dataclass(frozen=True)
class Case:
    """A checkpoint from `ranks` ranks in `layout`, loaded in each of `into`: (ranks, layout). other: key of a model
    with other settings."""

    model: str
    ranks: int
    layout: dict[str, int]
    into: tuple[tuple[int, dict[str, int]], ...]
    other: str | None = None

    @property
    def name(self) -> str:
        return f"{self.model}-{describe(self.ranks, self.layout)}"


def describe(ranks: int, layout: dict[str, int]) -> str:
    return "".join(f"{key}{size}" for key, size in layout.items()) + f"of{ranks}"


SHARDED = {"shard_parameters": True}
FSDP2 = {"strategy": "fsdp2"}
CASES = [
    Case("dense", 1, {}, ((2, {"tp": 2}),)),
    Case("dense", 2, {"tp": 2}, ((2, {"pp": 2}),)),
    Case("dense", 2, {"pp": 2, "vpp": 2}, ((2, {}), (2, {"pp": 2, "vpp": 2}))),
    Case("tied", 2, {"pp": 2}, ((1, {}),)),
    Case("moe", 2, {"tp": 2, "ep": 2}, ((4, {"ep": 4}), (4, {"ep": 2, **SHARDED}), (2, FSDP2))),
    Case("v3", 2, {"tp": 2, "ep": 2}, ((2, {"pp": 2, "ep": 1}), (2, FSDP2))),
    Case("moe", 2, FSDP2, ((4, {"ep": 2, "tp": 2}), (1, FSDP2))),
    Case("mtp", 2, {"pp": 2}, ((1, {}), (2, {"tp": 2}))),
    Case("dense bf16", 2, {}, ((2, {"tp": 2}), (2, SHARDED), (2, FSDP2))),
    Case("tied", 2, SHARDED, ((1, {}),)),
    Case("tied", 2, FSDP2, ((1, {}), (2, {"tp": 2}), (1, FSDP2))),
    Case("moe bf16", 2, {"ep": 2, **SHARDED}, ((2, {}), (4, {"tp": 2, **SHARDED}), (2, FSDP2))),
    Case("replicated", 2, {}, ((2, {}),), other="dense"),
    Case("replicated bf16", 2, {"ep": 2}, ((2, {}),)),
    Case("moe bf16", 1, {}, ((2, {"tp": 2, "ep": 2}),)),
]
RESUMED = [(case, *into) for case in CASES for into in case.into]
IDS = [f"{case.name}-to-{describe(ranks, layout)}" for case, ranks, layout in RESUMED]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("resharding")
    for name, (kind, _) in MODELS.items():
        write_tiny_model(directory / name, kind, num_hidden_layers=4)
    add_mtp_layer(directory / "mtp")
    return str(directory)


def _actor(root: str, model: str, layout: dict[str, Any]) -> Any:
    config = policy_batch.config(f"{root}/{model}", layout, 24)
    optimizer = config.actor.optimizer
    # eps and warm-up: see test_actor_update.
    optimizer.lr, optimizer.eps, optimizer.warmup_steps, optimizer.clip_grad = 4e-3, 1e-2, 1, 0.5
    for key, value in MODELS[model][1].items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    return policy_batch.build_actor(config)


def _pieces(actor: Any) -> dict[str, list[Any]]:
    """This rank's slices of HF tensors: weights and optimizer state."""
    found = {"weight": policy_batch.hf_pieces(actor)}
    for name, tensors in _optimizer_tensors(actor).items():
        found[name] = policy_batch.hf_pieces(actor, {**actor.tensors(), **tensors})
    return found


def _optimizer_tensors(actor: Any) -> dict[str, Tensors]:
    """Optimizer state by kind and canonical name, gathered over data-parallel ranks by Megatron."""
    names = {(tensor.data_ptr(), tensor.shape): name for name, tensor in actor.tensors().items()}
    found: dict[str, Tensors] = {"param": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for part in actor.optimizer.chained_optimizers:
        if part.optimizer is None:
            continue
        if not hasattr(part, "buffers"):
            _add_replicated(part, actor.tensors(), found)
            continue
        gathered = part.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
        for index, buffer in enumerate(part.buffers):
            (world,) = gathered[index].values()
            for parameter, (start, stop, _) in buffer.param_index_map.items():
                name = names[parameter.data_ptr(), parameter.shape]
                for kind, tensors in found.items():
                    tensors[name] = world[kind][start:stop].view(parameter.shape)
    return found


def _add_replicated(part: Any, tensors: Tensors, found: dict[str, Tensors]) -> None:
    """Add optimizer state that Megatron does not gather: of whole parameters, or of this rank's shards."""
    held = [p for group in part.optimizer.param_groups for p in group["params"]]
    # The model's parameter refers to its main parameter.
    models = {id(p.main_param): p for group in getattr(part, "float16_groups", ()) for p in group}
    states = {"param": {id(p): p.detach() for p in held}}
    states |= {kind: {id(p): part.optimizer.state[p][kind] for p in held} for kind in ("exp_avg", "exp_avg_sq")}
    for kind, state in states.items():
        pairs = [(models.get(id(p), p), state[id(p)]) for p in held]
        for name, tensor in tensors.items():
            if any(_contains(parameter, tensor) for parameter, _ in pairs):
                found[kind][name] = policy_batch.part_like(tensor, pairs)


def _contains(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and 0 <= tensor.data_ptr() - parameter.data_ptr() < parameter.nbytes


def _optimizers(actor: Any) -> list[Any]:
    return [part.optimizer for part in actor.optimizer.chained_optimizers if part.optimizer is not None]


def _steps(actor: Any) -> set[float]:
    """Step counts: torch's AdamW counts per parameter, TransformerEngine per group."""
    counts = [held for inner in _optimizers(actor) for held in (*inner.state.values(), *inner.param_groups)]
    return {float(held["step"]) for held in counts if "step" in held}


def _save(rank: int, root: str, cases: list[Case]) -> dict[str, Any]:
    """Run two updates, save a checkpoint, and run a third update."""
    from tests.distributed.saving import save_checkpoint

    found = {}
    for case in cases:
        actor = _actor(root, case.model, case.layout)
        policy_batch.update_once(actor, 0)
        policy_batch.update_once(actor, 1)
        save_checkpoint(f"{root}/{case.name}", actor)
        before = _pieces(actor)
        policy_batch.update_once(actor, 2)
        found[case.name] = before, _pieces(actor), len(_optimizers(actor))
    return found


def _load(rank: int, root: str, resumed: list[tuple[Case, dict[str, int]]]) -> list[Any]:
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint

    found = []
    for case, layout in resumed:
        actor = _actor(root, case.other or case.model, layout)
        load_checkpoint(f"{root}/{case.name}", actor)
        loaded, steps, rate = _pieces(actor), _steps(actor), actor.optimizer.param_groups[0]["lr"]
        policy_batch.update_once(actor, 2)
        found.append((loaded, _pieces(actor), steps | {s - 1 for s in _steps(actor)}, rate, len(_optimizers(actor))))
    return found


@pytest.fixture(scope="module")
def saved(root: str) -> dict[str, tuple[dict[str, Tensors], dict[str, Tensors], Any]]:
    """By case: state when saved, state one update later, number of optimizers on a rank."""
    joined = {}
    for size in sorted({case.ranks for case in CASES}):
        cases = [case for case in CASES if case.ranks == size]
        ranks = launch(_save, size, root, cases)
        for case in cases:
            parts = [rank[case.name] for rank in ranks]
            joined[case.name] = _joined(parts, 0), _joined(parts, 1), parts[0][2]
    return joined


@pytest.fixture(scope="module")
def loaded(root: str, saved: Any) -> dict[str, Any]:
    """By id: state after loading, state one update later, Adam's steps (for the latter minus one), learning rate,
    number of optimizers on a rank."""
    joined = {}
    for size in sorted({ranks for _, ranks, _ in RESUMED}):
        chosen = [(i, case, layout) for i, (case, ranks, layout) in enumerate(RESUMED) if ranks == size]
        results = launch(_load, size, root, [(case, layout) for _, case, layout in chosen])
        for position, (index, _, _) in enumerate(chosen):
            parts = [rank[position] for rank in results]
            steps = set().union(*(part[2] for part in parts))
            joined[IDS[index]] = _joined(parts, 0), _joined(parts, 1), steps, parts[0][3], parts[0][4]
    return joined


def _joined(parts: list[Any], index: int) -> dict[str, Tensors]:
    return {kind: policy_batch.assemble([part[index][kind] for part in parts]) for kind in parts[0][index]}


@pytest.mark.parametrize(("case", "name"), [(r[0], i) for r, i in zip(RESUMED, IDS, strict=True)], ids=IDS)
def test_resharding_restores_every_tensor_bitwise(case: Case, name: str, saved: Any, loaded: Any) -> None:
    before, found = saved[case.name][0], loaded[name][0]
    assert found.keys() == before.keys() == {"weight", "param", "exp_avg", "exp_avg_sq"}
    for kind, tensors in before.items():
        assert tensors.keys() == found[kind].keys()
        for tensor_name, tensor in tensors.items():
            assert not torch.isnan(tensor).any()
            assert torch.equal(found[kind][tensor_name], tensor), f"{kind} of {tensor_name}"
    assert any(tensor.any() for tensor in before["exp_avg_sq"].values())


@pytest.mark.parametrize(("case", "name"), [(r[0], i) for r, i in zip(RESUMED, IDS, strict=True)], ids=IDS)
def test_resharding_next_update_equals_saving_ranks(case: Case, name: str, saved: Any, loaded: Any) -> None:
    start, expected, _ = saved[case.name]
    _, found, steps, rate, _ = loaded[name]
    assert steps == {2.0}  # of every parameter, before and after: no step tensor is shared
    assert rate == 4e-3  # the schedule is past its warm-up
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        errors = {n: found[kind][n] - tensor for n, tensor in expected[kind].items()}
        if "bf16" in case.model:
            # Activations are rounded, and a router may choose another expert for near ties: all tensors are compared
            # together. Without moments or step counts the update would be entirely different.
            moved = _norm(tensor - start[kind][n] for n, tensor in expected[kind].items())
            assert _norm(errors.values()) <= 0.1 * moved, kind
            continue
        for tensor_name, error in errors.items():
            # Layouts sum gradients in a different order.
            largest = expected[kind][tensor_name].abs().max()
            assert error.abs().max() <= 1e-5 * largest, f"{kind} of {tensor_name}: {error.abs().max():.1e} of {largest}"


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(tensor.square().sum() for tensor in tensors)) ** 0.5


def test_resharding_from_one_optimizer_to_two(saved: Any, loaded: Any) -> None:
    """megatron-core 0.16.1 has a separate optimizer for experts if ep > 1, and its state_dict of one optimizer cannot
    be loaded into two ("Expected 2 entries in state dict, but got 4")."""
    before, _, optimizers = saved["moe bf16-of1"]
    found, *_, optimizers_then = loaded["moe bf16-of1-to-tp2ep2of2"]
    assert (optimizers, optimizers_then) == (1, 2)
    experts = [name for name in before["exp_avg"] if ".experts." in name]
    assert len(experts) > 10
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        assert all(torch.equal(before[kind][name], found[kind][name]) for name in experts)
