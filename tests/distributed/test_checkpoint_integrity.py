"""Checkpoints are complete snapshots of the state at the start of the save; damaged or foreign ones are not loaded."""

from __future__ import annotations

import errno
import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.errors import CheckpointError, DamagedCheckpointError
from mcore_rl.types import SavedFile
from tests.distributed import policy_batch
from tests.distributed.launch import launch
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("integrity")
    write_tiny_model(directory / "moe", "qwen3_moe")
    for name, layers in (("deeper", 6), ("shallower", 2)):
        write_tiny_model(directory / name, "qwen3_moe", num_hidden_layers=layers)
    return str(directory)


def _actor(directory: str, layout: dict[str, int], dtype: str = "float32") -> Any:
    config = policy_batch.config(directory, layout, 24)
    config.model.dtype, config.actor.optimizer.lr = dtype, 4e-3
    return policy_batch.build_actor(config)


def _state(actor: Any) -> list[torch.Tensor]:
    from mcore_rl.megatron.checkpoint.blocks import blocks_to_load

    return [block.view.clone() for block in blocks_to_load(actor.chunks, actor.optimizer)]


def _directory(root: str, name: str, rank: int) -> str:
    import torch.distributed as dist

    path = Path(root, name)
    if rank == 0:
        path.mkdir()
    dist.barrier()
    return str(path)


@pytest.fixture(scope="module")
def outcome(root: str) -> list[dict[str, Any]]:
    """Results of all checks on two ranks, from one launch."""
    return launch(_all, 2, root)


def _all(rank: int, root: str) -> dict[str, Any]:
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from tests.distributed.saving import save_checkpoint

    found: dict[str, Any] = {}
    actor = _actor(f"{root}/moe", {"ep": 2})
    found["before any update"] = _before_any_update(actor, f"{root}/first")
    found["isolated"] = _isolated(actor, _directory(root, "isolated", rank))
    directory = f"{root}/whole"
    files = _shared(save_checkpoint(directory, actor)).files
    found["files"] = files
    found["random"] = _random_streams(actor, directory)
    found["random of a GPU"] = _restored_from_gpu(actor)
    found["damaged"] = [_refused(actor, directory, _damaged(files, name)) for name in ("__0_0.distcp", "__1_0.distcp")]
    found["unwritable"] = _unwritable(actor, f"{root}/nowhere")
    load_checkpoint(directory, actor, files)
    for name, layout in (("deeper", {"ep": 2}), ("shallower", {"pp": 2})):
        found[name] = _refused(_actor(f"{root}/{name}", layout), directory, files)
    found["bfloat16"] = _refused(_actor(f"{root}/moe", {"tp": 2}, "bfloat16"), directory, files)
    return found


def _shared(saved: Any) -> Any:
    import torch.distributed as dist

    holder = [saved]
    dist.broadcast_object_list(holder)
    return holder[0]


def _before_any_update(actor: Any, directory: str) -> tuple[bool, bool]:
    """Save before the first update. Returns whether the weights stay equal and both update counts are 0."""
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from mcore_rl.megatron.optim.optimizer_state import updates_done
    from tests.distributed.saving import save_checkpoint

    weights = [tensor.clone() for tensor in actor.tensors().values()]
    save_checkpoint(directory, actor)
    counts = [updates_done(actor.optimizer)]
    load_checkpoint(directory, actor)
    counts.append(updates_done(actor.optimizer))
    same = all(torch.equal(old, new) for old, new in zip(weights, actor.tensors().values(), strict=True))
    return same, counts == [0, 0]


def _isolated(actor: Any, directory: str) -> tuple[bool, bool]:
    """Update after the snapshot. Returns whether this changed the state, and whether the files have the older state."""
    import torch.distributed as dist

    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from mcore_rl.megatron.checkpoint.writer import CheckpointWriter

    policy_batch.update_once(actor)
    before = _state(actor)
    writer = CheckpointWriter(directory, actor, snapshot=True)
    policy_batch.update_once(actor)
    after = _state(actor)
    reports: list[Any] = [None, None]
    dist.all_gather_object(reports, writer.write())
    if actor.rank == 0:
        writer.finish(reports)
    dist.barrier()
    load_checkpoint(directory, actor)
    loaded = _state(actor)
    changed = not any(torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.numel() > 1000)
    return changed, all(torch.equal(a, b) for a, b in zip(before, loaded, strict=True))


def _random_streams(actor: Any, directory: str) -> bool:
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint

    drawn = []
    for _ in range(2):
        load_checkpoint(directory, actor)
        drawn.append(torch.rand(8))
    torch.manual_seed(99)
    load_checkpoint(directory, actor)
    drawn.append(torch.rand(8))
    return torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


class _SavedOnGpu:
    """Reader of a checkpoint written by a rank on a GPU."""

    def read_object(self, key: str) -> dict[str, Any]:
        # In the format of torch.cuda.get_rng_state: seed and offset, 8 bytes each.
        state = torch.zeros(16, dtype=torch.uint8)
        host = torch.Generator().manual_seed(77).get_state()
        return {"host": host, "device": state, "named": {"model-parallel-rng": state}}


def _restored_from_gpu(actor: Any) -> list[list[float]]:
    """Random numbers after restoring, after seeding for 3 updates, and after seeding for 4."""
    from mcore_rl.megatron.checkpoint.objects import _UPDATES_BETWEEN_SEEDS, restore_random_state
    from mcore_rl.megatron.model import parallel

    restore_random_state(actor, _SavedOnGpu(), same_layout=True, updates_done=3)  # type: ignore[arg-type]
    drawn = [torch.rand(4).tolist()]
    for updates in (3, 4):
        parallel.seed_streams(actor.config.run.seed + _UPDATES_BETWEEN_SEEDS * updates)
        drawn.append(torch.rand(4).tolist())
    return drawn


def _damaged(files: tuple[SavedFile, ...], name: str) -> tuple[SavedFile, ...]:
    """Return the files with a changed checksum for `name`."""
    return tuple(replace(file, crc32=file.crc32 ^ 1) if file.name == name else file for file in files)


def _refused(actor: Any, directory: str, files: tuple[SavedFile, ...]) -> tuple[str, str, bool]:
    """Return type and text of the error, and whether the weights are unchanged."""
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint

    before = [tensor.clone() for tensor in actor.tensors().values()]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(directory, actor, files)
    same = all(torch.equal(old, new) for old, new in zip(before, actor.tensors().values(), strict=True))
    return type(caught.value).__name__, str(caught.value), same


def _unwritable(actor: Any, directory: str) -> tuple[int | None, str]:
    from mcore_rl.megatron.checkpoint.writer import CheckpointWriter

    with pytest.raises(FileNotFoundError) as caught:
        CheckpointWriter(directory, actor, snapshot=False).write()
    return caught.value.errno, str(caught.value.filename)


def test_checkpoint_snapshot_excludes_later_update(outcome: list[dict[str, Any]]) -> None:
    for rank in outcome:
        assert rank["isolated"] == (True, True)


def test_checkpoint_before_first_update_counts_no_update(outcome: list[dict[str, Any]]) -> None:
    for rank in outcome:
        assert rank["before any update"] == (True, True)


def test_checkpoint_reports_every_file_with_its_bytes(outcome: list[dict[str, Any]], root: str) -> None:
    directory = Path(root, "whole")
    files = {file.name: file for file in outcome[0]["files"]}
    assert set(files) == {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    for name, file in files.items():
        content = (directory / name).read_bytes()
        assert (file.num_bytes, file.crc32) == (len(content), zlib.crc32(content))


def test_checkpoint_same_layout_restores_random_state(outcome: list[dict[str, Any]]) -> None:
    assert all(rank["random"] for rank in outcome)


def test_checkpoint_of_gpu_on_cpu_seeds_random_state_anew(outcome: list[dict[str, Any]]) -> None:
    """Streams are seeded as in another layout; a CPU generator does not accept the state of a GPU."""
    for rank in outcome:
        restored, seeded, later = rank["random of a GPU"]
        assert restored == seeded
        assert restored != later


def test_checkpoint_damaged_file_is_named_and_not_loaded(outcome: list[dict[str, Any]]) -> None:
    for rank in outcome:
        for name, (kind, message, same) in zip(("__0_0.distcp", "__1_0.distcp"), rank["damaged"], strict=True):
            assert kind == DamagedCheckpointError.__name__
            assert f"{name} has another checksum than was saved" in message
            assert same


def test_checkpoint_of_other_model_or_dtype_is_rejected(outcome: list[dict[str, Any]]) -> None:
    for rank in outcome:
        for name, expected in (
            ("deeper", "does not fit this model: it has no decoder.layers.4."),
            ("shallower", "contains tensors that this model does not have: decoder.layers.2."),
            ("bfloat16", "has dtype torch.float32, the model torch.bfloat16 (model.dtype)"),
        ):
            kind, message, same = rank[name]
            assert (kind, same) == ("CheckpointError", True)
            assert expected in message


def test_checkpoint_write_failure_names_file(outcome: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(outcome):
        number, name = found["unwritable"]
        assert number == errno.ENOENT
        assert os.path.basename(name) == f"__{rank}_0.distcp"
