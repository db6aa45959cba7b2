"""Restoring trainer state from a megatron-core distributed checkpoint: model, optimizer, schedule, random streams.

Layouts of saving and loading may differ in tp, pp, vpp, ep, etp, cp, dp and in the use of the distributed optimizer.

| file | contents |
|---|---|
| `__<rank>_<n>.distcp` | blocks owned by a rank (blocks.py), in the format of torch.distributed.checkpoint |
| `.metadata` | location of each block of each tensor |
| `metadata.json` | format and version of Megatron's checkpoint |
| `common.pt` | layout, number of updates, schedule, loss scale, adapter settings |
| `config_and_tokenizer/` | configuration and tokenizer files, for `python -m model_converters to-hf` |

Megatron's `dist_checkpointing.load` can read the model. Optimizer state is saved and loaded by this package, because
Megatron's state_dict of optimizers depends on the layout (optimizer_state.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mcore_rl.data.checksum import file_crc32
from mcore_rl.data.read_progress import READS
from mcore_rl.errors import CheckpointError, ConfigError, DamagedCheckpointError, McoreRLError
from mcore_rl.megatron.checkpoint.blocks import (
    AVERAGE_PREFIX,
    REFERENCE_PREFIX,
    LiveBlock,
    blocks_to_load,
    frozen_blocks,
    weight_blocks,
)
from mcore_rl.megatron.checkpoint.format_files import read_common, saved_layout
from mcore_rl.megatron.checkpoint.objects import load_extra_states, restore_random_state
from mcore_rl.megatron.optim.optimizer_state import set_updates_done
from mcore_rl.resolved.adapters import adapter_identity
from mcore_rl.types import SavedFile
from model_converters.dcp.blocks import Box
from model_converters.dcp.metadata import read_metadata
from model_converters.dcp.reader import DcpReader
from model_converters.errors import ConversionError, listing

if TYPE_CHECKING:
    from mcore_rl.megatron.model.output import ModelChunk
    from mcore_rl.megatron.roles.rank_model import TrainedModel


def load_checkpoint(directory: str, model: TrainedModel, files: Sequence[SavedFile] = ()) -> None:
    """Restore the saved state, bitwise equal in any layout except for random streams (objects.py). First compares
    `files` with their checksums.

    Raises: DamagedCheckpointError, or CheckpointError if the checkpoint does not fit the model; nothing was loaded
    then.
    Collective: all ranks.
    """
    # Before anything is loaded: damage that is found later would leave a mixture of both states.
    verify_files(Path(directory), files)
    problem: McoreRLError | None = None
    try:
        common = read_common(directory)
        reader = DcpReader(Path(directory), read_metadata(Path(directory)))
    except (ConversionError, CheckpointError) as error:
        problem = CheckpointError(str(error))
    # Only some ranks may fail to read the files; the others would wait in the collectives below.
    raise_on_every_rank(problem)
    reference = model.saved_reference
    check_reference_kept(directory, reader.shapes, kept_here=reference is not None)
    check_averages_kept(directory, reader.shapes, model.averages)
    check_adapters(directory, common.get("adapters"), adapter_identity(model.role.section.lora, model.hf_config))
    # Blocks are views of live tensors, which must be on the device.
    model.memory.load("params", "optimizer")
    blocks = blocks_to_load(model.chunks, model.optimizer) + frozen_blocks(model, to_save=False)
    # All checks precede the first write, so that a rejected checkpoint leaves the state unchanged.
    check_fit(reader, blocks, model.device)
    try:
        read_blocks(reader, blocks)
        load_extra_states(model.chunks, reader)
        if reference is not None:
            reference.memory.offload()
        for average in model.averages.values():
            average.restored()
        set_updates_done(model.optimizer, common["optimizer_updates"])
        model.scheduler.load_state_dict(common["scheduler"])
        scale = common.get("loss_scale")
        if model.loss_scaler is not None and scale is not None:
            model.loss_scaler.load(scale)
        same_layout = common["layout"] == saved_layout(model.layout)
        restore_random_state(model, reader, same_layout=same_layout, updates_done=common["optimizer_updates"])
    except (ConversionError, KeyError) as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error


def load_weights(directory: str, models: list[ModelChunk], key: str) -> None:
    """Load the weights of a policy's checkpoint, which any layout has saved, into a frozen model, converted to its
    dtype. Optimizer state and other entries are not read.

    Raises: ConfigError, the same on every rank, that names `key` and lists all differences.
    Collective: all ranks.
    """
    problem: McoreRLError | None = None
    try:
        reader, blocks = DcpReader(Path(directory), read_metadata(Path(directory))), weight_blocks(models)
        misfits = dict.fromkeys(text for block in blocks if (text := _misfit(reader, block, any_dtype=True)))
        if misfits:
            raise ConversionError(f"it does not fit the model in its configuration: {listing(list(misfits))}")
        read_blocks(reader, blocks)
    except ConversionError as error:
        problem = ConfigError(f"{key}={directory}: {error}")
    raise_on_every_rank(problem)


def verify_files(directory: Path, files: Sequence[SavedFile]) -> None:
    """Compare size and checksum of every file with the saved values. Each rank reads an equal share of the bytes.

    Raises: DamagedCheckpointError on every rank, with the names of the files.
    Collective: all ranks.
    """
    own = list(_files_of_rank(files, dist.get_rank(), dist.get_world_size()))
    READS.update("checking the checkpoint", 0, total := sum(file.num_bytes for file in own))
    done, problems = 0, []
    for file in own:
        problems.append(_damage(directory, file))
        READS.update("checking the checkpoint", done := done + file.num_bytes, total)
    damage = "; ".join(problem for problem in problems if problem)
    raise_on_every_rank(DamagedCheckpointError(f"{directory} is damaged: {damage}") if damage else None)


def _files_of_rank(files: Sequence[SavedFile], rank: int, num_ranks: int) -> Iterator[SavedFile]:
    """Assign files to ranks, the largest first to the rank with the fewest bytes. Deterministic, so all ranks agree."""
    loads = [0] * num_ranks
    for file in sorted(files, key=lambda file: (-file.num_bytes, file.name)):
        reading_rank = loads.index(min(loads))
        loads[reading_rank] += file.num_bytes
        if reading_rank == rank:
            yield file


def _damage(directory: Path, file: SavedFile) -> str | None:
    try:
        crc = file_crc32(directory / file.name)
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    if crc.num_bytes != file.num_bytes:
        return f"{file.name} has {crc.num_bytes} of {file.num_bytes} bytes"
    return None if crc.value == file.crc32 else f"{file.name} has another checksum than was saved"


def raise_on_every_rank(problem: McoreRLError | None) -> None:
    """Raise the problem of the first rank that has one on every rank. Otherwise the other ranks would hang in the next
    collective.

    Collective: all ranks.
    """
    problems: list[McoreRLError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank_problem in problems:
        if rank_problem is not None:
            raise rank_problem


def check_reference_kept(directory: str, stored: Iterable[str], *, kept_here: bool) -> None:
    """Check that the checkpoint (by its keys) contains reference weights if and only if this run saves them.

    Raises: CheckpointError.
    """
    kept_there = any(key.startswith(REFERENCE_PREFIX) for key in stored)
    if kept_there == kept_here:
        return
    there, here = ("contains", "saves none") if kept_there else ("does not contain", "saves them")
    raise CheckpointError(
        f"{directory} {there} the weights of a reference, but this run {here}: restore the earlier values of "
        "algorithm.kl.in_loss, algorithm.kl.in_reward and reference.*, or set run.dir to a new directory"
    )


def check_averages_kept(directory: str, stored: Iterable[str], here: Iterable[int]) -> None:
    """Check that the checkpoint (by its keys) contains moving averages of the same teachers as this run, by number.

    Raises: CheckpointError.
    """
    numbers = {key.removeprefix(AVERAGE_PREFIX).partition(".")[0] for key in stored if key.startswith(AVERAGE_PREFIX)}
    if numbers != {str(number) for number in here}:
        there, own = len(numbers), len(list(here))
        raise CheckpointError(
            f"{directory} contains {there} moving averages of the policy's weights, and this run has {own}, or others: "
            "restore the earlier values of teacher.moving_average and teacher.by_source, or set run.dir to a new "
            "directory"
        )


def check_adapters(directory: str, saved: Mapping[str, object] | None, configured: Mapping[str, object] | None) -> None:
    """Compare the saved adapter settings with the configured ones. None: all weights are trained.

    Raises: CheckpointError.
    """
    if saved == configured:
        return
    how, remedy = "without adapters", "set actor.lora.rank=0"
    if saved is not None:
        how = "with adapters"
        remedy = "set " + ", ".join(f"actor.lora.{key}={value}" for key, value in saved.items())
    raise CheckpointError(f"{directory} was saved {how}; {remedy}, or set run.dir to a new directory")


def check_fit(reader: DcpReader, blocks: Sequence[LiveBlock], device: torch.device) -> None:
    """Check that the checkpoint contains all blocks of all ranks, in the model's shapes and dtypes, and nothing else.

    Raises: CheckpointError, the same on every rank, that lists all differences.
    Collective: all ranks.
    """
    # Without duplicates: all blocks of a tensor usually have the same problem.
    misfits = dict.fromkeys(problem for block in blocks if (problem := _misfit(reader, block)))
    raise_on_every_rank(
        CheckpointError(f"{reader.directory} does not fit this model: {listing(list(misfits))}") if misfits else None
    )
    # A tensor is extra only if no rank needs it.
    stored = sorted(reader.shapes)
    needed = {block.chunk.key for block in blocks}
    is_needed = torch.tensor([key in needed for key in stored], dtype=torch.int32, device=device)
    dist.all_reduce(is_needed, dist.ReduceOp.MAX)
    extra = [key for key, some_rank in zip(stored, is_needed.tolist(), strict=True) if not some_rank]
    if extra:
        raise CheckpointError(f"{reader.directory} contains tensors that this model does not have: {listing(extra)}")


def _misfit(reader: DcpReader, block: LiveBlock, *, any_dtype: bool = False) -> str | None:
    chunk = block.chunk
    stored_shape = reader.shapes.get(chunk.key)
    if stored_shape is None:
        return f"it has no {chunk.key}"
    if reader.dtype(chunk.key) != block.view.dtype and not any_dtype:
        return f"{chunk.key} has dtype {reader.dtype(chunk.key)}, the model {block.view.dtype} (model.dtype)"
    # Only the length of the vocabulary may differ: its padding depends on tp.
    fits = stored_shape == chunk.global_shape or (chunk.padded and stored_shape[1:] == chunk.global_shape[1:])
    if not fits:
        return f"{chunk.key} has shape {stored_shape}, in the model {chunk.global_shape}"
    part = _stored_part(reader, block)
    return reader.problem(chunk.key, part) if part is not None else None


def _stored_part(reader: DcpReader, block: LiveBlock) -> Box | None:
    """Return the part of the block that the checkpoint contains. Its vocabulary padding may be shorter."""
    shape = reader.shapes[block.chunk.key]
    return block.chunk.stored.overlap(Box((0,) * len(shape), shape))


def read_blocks(reader: DcpReader, blocks: Sequence[LiveBlock]) -> None:
    """Read every block into its tensor; padding that the checkpoint does not contain becomes zero.

    Raises: ConversionError that names the file.
    """
    done, total = 0, sum(block.view.nbytes for block in blocks)
    with torch.no_grad():
        for block in blocks:
            READS.update("loading the checkpoint", done, total)
            done += block.view.nbytes
            stored = block.chunk.stored
            part = _stored_part(reader, block)
            # Only padding of the vocabulary may be missing (see _misfit).
            if part != stored:
                block.view.zero_()
            if part is None:
                continue
            # The checkpoint stacks layers and experts in leading dimensions, which the tensor in memory lacks.
            stacked = len(stored.shape) - block.view.dim()
            target = part.moved(stored.offset, (0,) * len(stored.offset))
            inner = Box(target.offset[stacked:], target.shape[stacked:])
            inner.view(block.view).copy_(reader.read(block.chunk.key, part).reshape(inner.shape))
