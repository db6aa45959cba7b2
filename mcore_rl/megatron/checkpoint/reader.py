"""Fills the live tensors of a rank from a checkpoint that ranks of any layout wrote: each reads the blocks it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.data.checksum import file_crc32
from mcore_rl.errors import CheckpointError, DamagedCheckpointError, McoreRLError
from mcore_rl.megatron.checkpoint.blocks import REFERENCE, LiveBlock
from mcore_rl.types import SavedFile
from model_converters.dcp.blocks import Box
from model_converters.dcp.reader import DcpReader
from model_converters.errors import listing


def verify_files(directory: Path, files: Sequence[SavedFile]) -> None:
    """Compares every file with the size and checksum it was saved with. Each rank reads its share of the bytes.

    Raises: DamagedCheckpointError on every rank, naming the files.
    Collective: all ranks.
    """
    problems = (_damage(directory, file) for file in _share(files, dist.get_rank(), dist.get_world_size()))
    damage = "; ".join(problem for problem in problems if problem)
    agree(DamagedCheckpointError(f"{directory} is damaged: {damage}") if damage else None)


def _share(files: Sequence[SavedFile], rank: int, num_ranks: int) -> Iterator[SavedFile]:
    """The files of one rank: the largest first to whoever has the fewest bytes, the same on every rank."""
    loads = [0] * num_ranks
    for file in sorted(files, key=lambda file: (-file.num_bytes, file.name)):
        taker = loads.index(min(loads))
        loads[taker] += file.num_bytes
        if taker == rank:
            yield file


def _damage(directory: Path, file: SavedFile) -> str | None:
    try:
        crc = file_crc32(directory / file.name)
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    if crc.num_bytes != file.num_bytes:
        return f"{file.name} has {crc.num_bytes} of {file.num_bytes} bytes"
    return None if crc.value == file.crc32 else f"{file.name} has another checksum than was saved"


def agree(problem: McoreRLError | None) -> None:
    """Raises the problem of the first rank that has one, on every rank: a rank that went on alone would hang.

    Collective: all ranks.
    """
    problems: list[McoreRLError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank_problem in problems:
        if rank_problem is not None:
            raise rank_problem


def check_reference_kept(directory: str, stored: Iterable[str], *, kept_here: bool) -> None:
    """Whether the checkpoint, by its keys, has weights of a reference just where this run keeps some in its own.

    Raises: CheckpointError.
    """
    kept_there = any(key.startswith(REFERENCE) for key in stored)
    if kept_there == kept_here:
        return
    there, wanted = ("the weights of a", "none") if kept_there else ("no", "one")
    raise CheckpointError(
        f"{directory} has {there} reference, and this run keeps {wanted} in its checkpoints: set algorithm.kl.in_loss, "
        "algorithm.kl.in_reward and reference.* as they were, or run.dir to a new directory"
    )


def check_adapters(directory: str, held: dict[str, Any] | None, wanted: dict[str, Any] | None) -> None:
    """Raises: CheckpointError when what a checkpoint says of its adapters is not what the configuration wants; None:
    all weights are trained."""
    if held == wanted:
        return
    saved, remedy = "without adapters", "set actor.lora.rank=0"
    if held is not None:
        saved = "with adapters"
        remedy = "set " + ", ".join(f"actor.lora.{key}={value}" for key, value in held.items())
    raise CheckpointError(f"{directory} was saved {saved}; {remedy}, or continue in another run.dir")


def check_fit(reader: DcpReader, blocks: Sequence[LiveBlock], device: torch.device) -> None:
    """The checkpoint must hold all that the ranks ask for, in the model's shapes and dtypes, and nothing besides.

    Raises: CheckpointError on every rank, ONE, listing what is wrong.
    Collective: all ranks.
    """
    misfits = dict.fromkeys(problem for block in blocks if (problem := _misfit(reader, block)))
    agree(CheckpointError(f"{reader.directory} does not fit this model: {listing(list(misfits))}") if misfits else None)
    stored = sorted(reader.shapes)
    wanted = {block.chunk.key for block in blocks}
    asked = torch.tensor([key in wanted for key in stored], dtype=torch.int32, device=device)
    dist.all_reduce(asked, dist.ReduceOp.MAX)
    left = [key for key, some in zip(stored, asked.tolist(), strict=True) if not some]
    if left:
        raise CheckpointError(f"{reader.directory} holds tensors that this model does not have: {listing(left)}")


def _misfit(reader: DcpReader, block: LiveBlock) -> str | None:
    chunk = block.chunk
    stored_shape = reader.shapes.get(chunk.key)
    if stored_shape is None:
        return f"it has no {chunk.key}"
    if reader.dtype(chunk.key) != block.view.dtype:
        return f"{chunk.key} is {reader.dtype(chunk.key)}, here {block.view.dtype} (model.dtype)"
    fits = stored_shape == chunk.global_shape or (chunk.padded and stored_shape[1:] == chunk.global_shape[1:])
    if not fits:
        return f"{chunk.key} is {stored_shape}, here {chunk.global_shape}"
    part = _stored_part(reader, block)
    return reader.problem(chunk.key, part) if part is not None else None


def _stored_part(reader: DcpReader, block: LiveBlock) -> Box | None:
    """What the checkpoint has of the block; it may end earlier in the padding of the vocabulary."""
    shape = reader.shapes[block.chunk.key]
    return block.chunk.stored.overlap(Box((0,) * len(shape), shape))


def fill(reader: DcpReader, blocks: Sequence[LiveBlock]) -> None:
    """Reads every block to its place; padding that the checkpoint lacks is zero.

    Raises: ConversionError naming the file.
    """
    with torch.no_grad():
        for block in blocks:
            stored = block.chunk.stored
            part = _stored_part(reader, block)
            if part != stored:
                block.view.zero_()
            if part is None:
                continue
            stacked = len(stored.shape) - block.view.dim()
            target = part.moved(stored.offset, (0,) * len(stored.offset))
            inner = Box(target.offset[stacked:], target.shape[stacked:])
            inner.view(block.view).copy_(reader.read(block.chunk.key, part).reshape(inner.shape))
