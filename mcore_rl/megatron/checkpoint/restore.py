"""Trainer state as a megatron-core distributed checkpoint: model, optimizer, schedule, random streams. What ranks of
any layout saved, ranks of any other load: tp, pp, vpp, ep, etp, cp, dp, with or without the distributed optimizer.

| file | holds |
|---|---|
| `__<rank>_<n>.distcp` | the blocks that a rank owns (train_state.py), in torch.distributed.checkpoint's format |
| `.metadata`, `metadata.json` | where each block of each tensor is; that it is a checkpoint of megatron's |
| `common.pt` | the layout, the number of updates, the schedule, which adapters |
| `hf/` | configuration and tokenizer files, so that `python -m model_converters to-hf` makes a model of it |

Megatron's own `dist_checkpointing.load` reads the model; its optimizers' state_dict depends on their number, which
depends on the layout (optimizer_state.py), so optimizers are saved and loaded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.errors import CheckpointError, McoreRLError
from mcore_rl.megatron.checkpoint.blocks import blocks_to_load, load_extra_states, reference_blocks
from mcore_rl.megatron.checkpoint.format_files import read_common
from mcore_rl.megatron.checkpoint.random_state import restore_random_state
from mcore_rl.megatron.checkpoint.reader import (
    agree,
    check_adapters,
    check_fit,
    check_reference_kept,
    fill,
    verify_files,
)
from mcore_rl.megatron.optim.optimizer_state import set_updates_done
from mcore_rl.resolved.adapters import adapter_identity
from mcore_rl.types import SavedFile
from model_converters.dcp.metadata import read_metadata
from model_converters.dcp.reader import DcpReader
from model_converters.errors import ConversionError

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.trained_model import Trained


def load_checkpoint(directory: str, role: Trained, files: Sequence[SavedFile] = ()) -> None:
    """Restores what was saved, bit by bit whatever the layout, but for random streams (random_state.py); `files` are
    compared with their checksums first.

    Raises: DamagedCheckpointError; CheckpointError when it is not of this model. Then nothing was loaded.
    Collective: all ranks.
    """
    verify_files(Path(directory), files)
    problem: McoreRLError | None = None
    try:
        common = read_common(directory)
        reader = DcpReader(Path(directory), read_metadata(Path(directory)))
    except (ConversionError, CheckpointError) as error:
        problem = CheckpointError(str(error))
    agree(problem)
    trained, model, reference = role.trained, role.trained.model, role.trained.reference
    check_reference_kept(directory, reader.shapes, kept_here=reference is not None)
    check_adapters(directory, common.get("adapters"), adapter_identity(model.role.section.lora, model.hf_config))
    trained.memory.load("params", "optimizer")
    blocks = blocks_to_load(model.chunks, trained.optimizer)
    if reference is not None:
        reference.memory.load("params")
        blocks += reference_blocks(reference.model.chunks, to_save=False)
    check_fit(reader, blocks, model.device)
    try:
        fill(reader, blocks)
        load_extra_states(model.chunks, reader)
        if reference is not None:
            reference.memory.offload()
        set_updates_done(trained.optimizer, common["optimizer_updates"])
        trained.scheduler.load_state_dict(common["scheduler"])
        restore_random_state(
            model,
            reader,
            same_layout=common["layout"] == asdict(model.layout),
            seed=trained.seed,
            updates_done=common["optimizer_updates"],
        )
    except (ConversionError, KeyError) as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
