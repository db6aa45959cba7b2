"""Rank functions of test_lora_run.py: two updates, exports, checkpoints, and the resulting state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.config.models import OffloadConfig, ParallelConfig
from tests.distributed import lora, policy_batch
from tests.distributed.syncing import synced_slices
from tests.distributed.two_steps import train_two_steps

Layout = tuple[int, dict[str, Any]]
SMALL = 24


@dataclass(frozen=True)
class Case:
    """A checkpoint saved by ranks in `layout` and loaded in each of `into`: (ranks, layout)."""

    model: str
    layout: Layout
    into: tuple[Layout, ...] = ()
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.model} {self.dtype} {describe(self.layout)}"


def describe(layout: Layout) -> str:
    return "".join(f"{key}{size}" for key, size in layout[1].items()) + f"of{layout[0]}"


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offloaded": {"offload": OffloadConfig(params=True, grads=True, optimizer=True)},
    "optimizer on the host": {"cpu_offload": True},
    "overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "replicated": {"distributed_optimizer": False},
    "sharded": {
        "parallel": ParallelConfig(shard_parameters=True),
        "offload": OffloadConfig(params=True, optimizer=True),
    },
    "transformers": {"strategy": "fsdp2"},
    "transformers recomputed": {
        "strategy": "fsdp2",
        "recompute": "full",
        "offload": OffloadConfig(params=True, optimizer=True),
    },
}


def _actor(root: str, model: str, layout: Layout, dtype: str = "float32", **changes: Any) -> Any:
    config = lora.lora_config(model, f"{root}/{model}", layout[1], SMALL, path=False)
    config.model.dtype = dtype
    config.algorithm.kl.in_loss = 0.1
    optimizer = config.actor.optimizer
    # eps: see test_actor_update
    optimizer.lr, optimizer.eps, optimizer.clip_grad = 4e-2, 1e-2, 0.5
    for key, value in changes.items():
        setattr(config.actor.lora, key, value)
    return policy_batch.build_actor(config)


def _update(actor: Any, index: int) -> None:
    batch, _ = actor.recompute_logp([policy_batch.shares(actor)[index % 2]], policy_batch.chunks())
    actor.update(actor.reference_logp(batch), 0)


def _state(actor: Any) -> list[Any]:
    from mcore_rl.megatron.checkpoint.blocks import blocks_to_load

    return [
        (block.chunk.key, block.chunk.global_shape, block.chunk.stored, block.view.float().numpy().copy())
        for block in blocks_to_load(actor.chunks, actor.optimizer)
    ]


def _written(actor: Any) -> Counter[str]:
    """Number of elements that this rank writes of each tensor."""
    from mcore_rl.megatron.checkpoint.blocks import blocks_to_save

    found: Counter[str] = Counter()
    for block in blocks_to_save(actor.chunks, actor.optimizer):
        found[block.chunk.key] += block.view.numel()
    return found


def train(rank: int, root: str, cases: list[Case]) -> list[dict[str, Any]]:
    return [_train_one(rank, root, case) for case in cases]


def _train_one(rank: int, root: str, case: Case) -> dict[str, Any]:
    """Run two updates, export, save a checkpoint, and run a third update."""
    from mcore_rl.megatron.model.names import canonical_tensors
    from mcore_rl.megatron.roles.export import export_adapter, export_hf
    from tests.distributed.saving import save_checkpoint

    actor = _actor(root, case.model, case.layout, case.dtype)
    base = {name: tensor.clone() for name, tensor in canonical_tensors(actor.chunks).items()}
    found: dict[str, Any] = {
        "base": policy_batch.hf_pieces(actor, base),
        "merged before": policy_batch.hf_pieces(actor),
        "adapters before": lora.adapter_pieces(actor),
    }
    _update(actor, 0)
    _update(actor, 1)
    actor.gather_parameters()
    now = canonical_tensors(actor.chunks)
    found |= {
        "base is unchanged": all(torch.equal(now[name], tensor) for name, tensor in base.items()),
        "merged": policy_batch.hf_pieces(actor),
        "adapters": lora.adapter_pieces(actor),
        "reference": _reference(actor),
        "state": _state(actor),
        "written": _written(actor),
        "digests": _digests(actor),
    }
    export_hf(actor, f"{root}/{case} merged", f"{root}/{case.model}")
    export_adapter(actor, f"{root}/{case} adapter", f"{root}/{case.model}")
    save_checkpoint(f"{root}/{case} checkpoint", actor)
    _update(actor, 2)
    return found | {"state later": _state(actor)}


def _reference(actor: Any) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
    from mcore_rl.megatron.step.loss.rank_batch import RankBatch

    shares, chunks = policy_batch.shares(actor), policy_batch.chunks()

    def policy() -> dict[int, np.ndarray]:
        found = {}
        for share in shares:
            for batch, logp in actor.infer(actor.microbatches(share, chunks), actor.objective.outputs.logp_of):
                found |= zip(batch.samples, (part.numpy() for part in logp.split(batch.trained_counts)), strict=True)
        return found

    before = policy()
    ref_logp = actor.reference_logp(RankBatch(shares, chunks)).ref_logp
    held = {s: (policy_batch.held(s, actor.layout, actor.rank), logp.numpy()) for s, logp in ref_logp.items()}
    return held, before, policy()


def _digests(actor: Any) -> dict[tuple[str, int, int, int, tuple[int, int] | None], bytes]:
    """Digests of all slices that this rank sends to an engine, by name, dim, start, length and rows."""
    from mcore_rl.weights.tensor_parts import part_of
    from mcore_rl.weights.verify import digest

    sent = synced_slices(actor)
    tensors = actor.tensors()
    return {
        (each.hf_name, each.dim, each.start, each.length, each.rows): digest(part_of(each, tensors, each.shape))
        for each in sent
    }


def resume(rank: int, root: str, chosen: list[tuple[Case, Layout]]) -> list[dict[str, Any]]:
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint

    found = []
    for case, into in chosen:
        actor = _actor(root, case.model, into, case.dtype)
        load_checkpoint(f"{root}/{case} checkpoint", actor)
        first = {"state": _state(actor), "merged": policy_batch.hf_pieces(actor)}
        _update(actor, 2)
        found.append(first | {"state later": _state(actor)})
    return found


def with_settings(rank: int, root: str) -> dict[str, Any]:
    """Run two steps on two data-parallel ranks with each of SETTINGS. Returns adapters and merged weights."""
    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        config = lora.lora_config("dense", f"{root}/dense", {}, SMALL, path=False)
        config.model.dtype, config.actor.optimizer.lr = "bfloat16", 4e-2
        for key, value in settings.items():
            setattr(config.actor.optimizer if key == "cpu_offload" else config.actor, key, value)
        actor = policy_batch.build_actor(config)
        found.setdefault("start", lora.adapter_pieces(actor))
        train_two_steps(actor, actor.memory.offload)
        merged = policy_batch.hf_pieces(actor)
        found[name] = lora.adapter_pieces(actor), merged
    return found


def refusals(rank: int, root: str, case: Case) -> dict[str, Any]:
    """Errors of loading checkpoints with other adapters than those of `case`, or without adapters, for a dense
    model."""
    from mcore_rl.errors import CheckpointError
    from mcore_rl.megatron.checkpoint.restore import load_checkpoint
    from tests.distributed.saving import save_checkpoint

    def refused(actor: Any, directory: str) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(directory, actor)
        return str(caught.value)

    layout: Layout = (1, {})
    directory = f"{root}/{case} checkpoint"
    full = _actor(root, "dense", layout, rank=0)
    save_checkpoint(f"{root}/full", full)
    actor = _actor(root, "dense", layout)
    before = _state(actor)
    found: dict[str, Any] = {"of a full run": refused(actor, f"{root}/full"), "full": refused(full, directory)}
    for key, value in {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}.items():
        found[key.removesuffix("_modules").replace("target", "targets")] = refused(
            _actor(root, "dense", layout, **{key: value}), directory
        )
    found["untouched"] = all(np.array_equal(a[3], b[3]) for a, b in zip(before, _state(actor), strict=True))
    return found
