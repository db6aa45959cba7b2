"""Contents of a rank's distributed checkpoint, for any layout, computed in one process.

Megatron's own model is built on the meta device in a fake process group, so no other ranks, memory or weights are
needed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories, is_main_replica
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from mcore_rl.config.models import ActorConfig, ModelConfig, ParallelConfig
from mcore_rl.config.roles import POLICY, KeyNames, ModelRole
from mcore_rl.errors import McoreRLError
from mcore_rl.megatron.model import parallel
from mcore_rl.megatron.model.model import build_model
from mcore_rl.megatron.model.names import canonical_tensors
from mcore_rl.megatron.model.output import PolicyModel
from mcore_rl.megatron.model.stored_chunks import chunks_of
from mcore_rl.megatron.model.value_model import ValueModel
from mcore_rl.resolved.installed import Installed
from mcore_rl.resolved.layout import train_layout
from mcore_rl.resolved.model import ResolvedModel
from model_converters.dcp.blocks import Naming, ShardedRankState, StateObject
from model_converters.mapping.layout import TrainLayout


class FlagNames(KeyNames):
    """The policy's keys, with the converters' flags for the sizes of a layout: parallel.tp is --tp."""

    def key(self, name: str) -> str:
        section, _, size = name.partition(".")
        return "--" + size.replace("_", "-") if section == "parallel" and size in _SIZES else super().key(name)


_SIZES = {field.name for field in fields(ParallelConfig)}


def rank_state(
    hf_config: dict[str, object],
    layout: TrainLayout,
    rank: int,
    *,
    naming: Naming = "default",
    has_value_head: bool = False,
) -> ShardedRankState:
    """Compute the checkpoint contents of `rank`, with Megatron's keys, global shapes and offsets. A naming that does
    not apply to the model is ignored. `has_value_head`: the model is a critic or a reward model.

    Raises: ConfigError, with the converter's flags (--tp) instead of keys, for a model that cannot be built or does not
    fit the layout; McoreRLError if this process is in a process group.
    """
    kind = ValueModel if has_value_head else PolicyModel
    with meta_model(hf_config, layout, rank, kind, names=FlagNames("actor")) as chunks:
        tensors = canonical_tensors(chunks)
        entries = [entry for chunk in chunks for entry in _entries(chunk, naming)]
        return ShardedRankState(
            chunks=tuple(chunks_of(entries, tensors)),
            # Megatron's writer stores a list, because a rank may hold several objects with the same key.
            objects=tuple(pickled_object(e.unique_key, [e.data]) for e in entries if isinstance(e, ShardedObject)),
            shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        )


@contextmanager
def meta_model(
    hf_config: dict[str, object],
    layout: TrainLayout,
    rank: int,
    kind: type[PolicyModel] = PolicyModel,
    *,
    names: KeyNames = POLICY,
) -> Iterator[list[PolicyModel]]:
    """Return a context with the chunks (class `kind`) of `rank` in `layout`, in bfloat16 on the meta device. Within the
    context, Megatron's parallel state is set up for `rank`.

    Raises: like rank_state.
    """
    sizes = {axis: getattr(layout, axis) for axis in _SIZES & {field.name for field in fields(layout)}}
    # Build the layout again with the checks for this model: `layout` may come from command-line flags.
    checked = train_layout(ParallelConfig(**sizes), layout.world_size, hf_config, names)
    layout = replace(checked, hf_tensors=layout.hf_tensors)
    with _fake_process_group(layout, rank):
        with torch.device("meta"):
            model = ModelConfig(hf_path="", dtype="bfloat16")
            role = ModelRole(names.prefix, names.checkpoint, section=ActorConfig(), model=model)
            # TransformerEngine does not support the meta device; the local spec has the same keys and shapes.
            chunks = build_model(ResolvedModel(role, hf_config, layout), kind=kind, installed=Installed())
        yield chunks


@contextmanager
def _fake_process_group(layout: TrainLayout, rank: int) -> Iterator[None]:
    """Return a context in which this process is `rank` of a process group whose collectives transfer nothing."""
    if dist.is_initialized():
        raise McoreRLError("a checkpoint cannot be planned in a process that already belongs to a process group")
    # Imported here: it registers a backend with torch.distributed.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        with _only_own_groups(rank):
            parallel.initialize_groups(layout, timeout_seconds=60, seed=0, gloo_groups=False)
        yield
    finally:
        parallel.destroy()


_make_group, _enumerate_groups = parallel_state.create_group, parallel_state.generate_masked_orthogonal_rank_groups


@contextmanager
def _only_own_groups(rank: int) -> Iterator[None]:
    """Return a context in which Megatron creates only the process groups that contain `rank`.

    By default it enumerates and creates all groups on every rank: 2,800 groups for 512 ranks, half of the time to
    simulate a rank.
    """

    def make_own(ranks: Sequence[int], **options: object) -> dist.ProcessGroup:
        return _make_group(ranks, **options) if rank in ranks else dist.GroupMember.NON_GROUP_MEMBER

    def enumerated(world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
        # Copy, because the caller may modify the lists.
        return [list(ranks) for ranks in _rank_groups(world_size, tuple(parallel_size), tuple(mask))]

    parallel_state.create_group, parallel_state.generate_masked_orthogonal_rank_groups = make_own, enumerated
    try:
        yield
    finally:
        parallel_state.create_group = _make_group
        parallel_state.generate_masked_orthogonal_rank_groups = _enumerate_groups


@lru_cache(maxsize=64)
def _rank_groups(world_size: int, parallel_size: tuple[int, ...], mask: tuple[bool, ...]) -> list[list[int]]:
    return _enumerate_groups(world_size, list(parallel_size), list(mask))


def _entries(chunk: PolicyModel, naming: Naming) -> list[ShardedTensor | ShardedObject]:
    metadata: dict[str, bool] = {}
    if naming == "by layer":
        metadata["non_homogeneous_layers"] = True
    if naming == "by expert":
        metadata["singleton_local_shards"] = True
    frequency = chunk.config.moe_layer_freq
    if naming == "stacked layers" and isinstance(frequency, list) and set(frequency) == {1}:
        chunk.config.moe_layer_freq = 1
    state = chunk.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(metadata))
    apply_factories(state)
    return [entry for entry in nested_values(state) if is_main_replica(entry.replica_id)]


def pickled_object(key: str, value: object) -> StateObject:
    stream = io.BytesIO()
    torch.save(value, stream)
    return StateObject(key, stream.getvalue())
