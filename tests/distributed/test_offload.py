"""Offloading of state to host memory between phases: freed bytes, and training that is bitwise unchanged."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config.models import OffloadConfig
from mcore_rl.errors import OffloadedError
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import case_parameters
from tests.distributed.two_steps import OVERLAPPED, configure, differences, held_tensors, run_cases, train_two_steps

CASES: dict[int, dict[str, tuple[str, str, dict[str, Any]]]] = {
    1: {"dense float32": ("qwen3", "float32", {})},
    2: {
        "dense dp2 bfloat16 replicated": ("qwen3", "bfloat16", {"actor": {"distributed_optimizer": False}}),
        "dense dp2 bfloat16 overlapped": ("qwen3", "bfloat16", {"actor": OVERLAPPED}),
        "moe ep2 bfloat16": ("qwen3_moe", "bfloat16", {"ep": 2}),
        "dense pp2 vpp2 bfloat16": ("qwen3", "bfloat16", {"pp": 2, "vpp": 2}),
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Results of all ranks by case."""
    return run_cases(_train_both_ways, CASES, tmp_path_factory.mktemp("offload"))


def _train_both_ways(rank: int, directories: dict[str, str], root: str, cases: dict[str, Any]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (kind, dtype, parallel) in cases.items():
        stays = _actor(directories[kind], dtype, parallel, offload=False)
        train_two_steps(stays, lambda: None)
        expected = held_tensors(stays)
        del stays
        gc.collect()
        leaves = _actor(directories[kind], dtype, parallel, offload=True)
        found = results[name] = {"before any update": _away_and_back(leaves)}
        train_two_steps(leaves, leaves.memory.offload)
        found["training"] = differences(expected, held_tensors(leaves))
        found["after updates"] = _away_and_back(leaves)
        found["part by part"] = _part_by_part(leaves)
        found["refusals"] = _refusals(leaves)
        found["checkpoint"] = _save_away_and_load(leaves, Path(root, "checkpoints", name), expected)
    return results


def _actor(directory: str, dtype: str, layout: dict[str, Any], *, offload: bool) -> Any:
    from mcore_rl.megatron.optim import offload as offloading

    config = configure(directory, dtype, layout)
    settings = config.actor.offload
    settings.params = settings.grads = settings.optimizer = offload
    offloading.PIECE_BYTES = 1000  # divides no tensor's size
    return policy_batch.build_actor(config)


def _storages(actor: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in this process except host copies. Delete the list before measuring again:
    it keeps the storages alive, and memory freed by gloo's threads in between would be counted."""
    with torch._C.DisableTorchFunctionSubclass():
        storages = {
            storage._cdata: storage
            for thing in gc.get_objects()
            if isinstance(thing, torch.Tensor)
            for storage in [thing.untyped_storage()]
        }
        for copy in actor.memory._copies.values():
            for piece in copy._pieces:
                storages.pop(piece.untyped_storage()._cdata, None)
    return list(storages.values())


def _num_bytes(*storages: torch.UntypedStorage) -> int:
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def _buffer_bytes(actor: Any) -> dict[str, int]:
    """Return the bytes allocated by Megatron per part, from the sizes of its buffers."""
    from mcore_rl.megatron.optim.main_params import optimizer_parts

    buffers = [b for chunk in actor.ddp for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    optimizer = 0
    float32 = actor.config.model.dtype == "float32"
    for inner in (part.optimizer for part in optimizer_parts(actor.optimizer)):
        masters = [p for group in inner.param_groups for p in group["params"]]
        moments = 2 if inner.state else 0
        optimizer += sum(4 * p.numel() * (moments + (0 if float32 else 1)) for p in masters)
    return {
        # Without the distributed optimizer every parameter has its own storage.
        "params": sum(
            (b.numel if b.param_data is not None else b.numel_unpadded) * b.param_dtype.itemsize for b in buffers
        ),
        "grads": sum(b.numel * 4 for b in buffers),
        "optimizer": optimizer,
    }


def _away_and_back(actor: Any) -> dict[str, Any]:
    actor.memory.load("params", "grads", "optimizer")
    gc.collect()
    sizes, before = _buffer_bytes(actor), _storages(actor)
    live = _num_bytes(*before)
    reported = actor.memory.offload()
    fell = live - _num_bytes(*before, *_storages(actor))
    again = actor.memory.offload()
    actor.memory.load("params", "grads", "optimizer")
    return {
        "sizes": sizes,
        "reported": reported,
        "again": again,
        "fell": fell,
        "back": live - _num_bytes(*before, *_storages(actor)),
        "left": actor.memory.released_bytes,
    }


def _part_by_part(actor: Any) -> dict[str, Any]:
    """Offload and load each part separately, in another order than Offloader does."""
    before = held_tensors(actor)
    sizes, fell = _buffer_bytes(actor), {}
    for part in ("optimizer", "params", "grads"):
        held = _storages(actor)
        live = _num_bytes(*held)
        actor.memory.offload([part])
        fell[part] = live - _num_bytes(*held, *_storages(actor))
    for part in ("params", "grads", "optimizer"):
        actor.memory.load(part)
        actor.memory.load(part)
    zero = all(not b.grad_data.any() for chunk in actor.ddp for b in (*chunk.buffers, *chunk.expert_parallel_buffers))
    return {"sizes": sizes, "fell": fell, "zero": zero, "differ": differences(before, held_tensors(actor))}


def _refusals(actor: Any) -> list[str]:
    """Return the errors of reading parameters, gradients and main parameters while they are offloaded."""
    parameter = next(actor.chunks[0].parameters())
    master = actor.optimizer.param_groups[0]["params"][0]
    actor.memory.offload()
    messages = []
    for tensor in (parameter, parameter.main_grad, master):
        for read in (lambda t: t + 1, lambda t: torch.equal(t, t), lambda t: t.detach(), lambda t: t.tolist()):
            try:
                read(tensor)
                messages.append("read")
            except OffloadedError as error:
                messages.append(str(error))
    return messages


def _save_away_and_load(actor: Any, directory: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from tests.distributed.saving import save_checkpoint

    actor.memory.offload()
    save_checkpoint(str(directory), actor)
    for tensor in actor.tensors().values():
        tensor.zero_()
    actor.memory.offload()
    load_checkpoint(str(directory), actor)
    return differences(expected, held_tensors(actor))


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_offload_frees_bytes_of_each_part_and_load_restores_them(size: int, case: str, results: Any) -> None:
    for rank in results[case]:
        for when in ("before any update", "after updates"):
            found = rank[when]
            assert all(found["sizes"].values()) or when == "before any update"
            total = sum(found["sizes"].values())
            assert (found["reported"], found["again"], found["fell"]) == (total, total, total)
            assert (found["back"], found["left"]) == (0, 0)


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_offload_between_phases_trains_bitwise_equal(size: int, case: str, results: Any) -> None:
    assert [rank["training"] for rank in results[case]] == [[]] * size


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_offload_parts_in_any_order(size: int, case: str, results: Any) -> None:
    for rank in results[case]:
        found = rank["part by part"]
        assert found["fell"] == found["sizes"]
        assert found["zero"]
        assert found["differ"] == []


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_offloaded_tensors_raise_when_read(size: int, case: str, results: Any) -> None:
    for rank in results[case]:
        params, grads, masters = rank["refusals"][:4], rank["refusals"][4:8], rank["refusals"][8:]
        assert all("actor.offload.params" in message for message in params)
        assert all("actor.offload.grads" in message for message in grads)
        owner = "params" if "float32" in case else "optimizer"  # in float32 the main parameters are the parameters
        assert all(f"actor.offload.{owner}" in message for message in masters)


@pytest.mark.parametrize("keeps", [OffloadConfig(), OffloadConfig(params=True)])
def test_offload_returns_freed_memory_if_no_part_leaves(keeps: OffloadConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of the last pass would stay in torch's allocator while an engine of the same GPU wakes up."""
    from mcore_rl.megatron.optim.offload import Offloader

    returned: list[None] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: returned.append(None))
    memory = Offloader([torch.nn.Linear(2, 2)], None, keeps)
    assert memory.offload(("grads", "optimizer")) == 0
    assert len(returned) == 1


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_checkpoints_are_saved_and_loaded_while_offloaded(size: int, case: str, results: Any) -> None:
    assert [rank["checkpoint"] for rank in results[case]] == [[]] * size
