"""Restoring trainer state from a megatron-core distributed checkpoint: model, optimizer, schedule, random streams.

Layouts of saving and loading may differ in tp, pp, vpp, ep, etp, cp, dp and in the use of the distributed optimizer.

| file | contents |
|---|---|
| `__<rank>_<n>.distcp` | blocks owned by a rank (blocks.py), in the format of torch.distributed.checkpoint |
| `.metadata` | location of each block of each tensor |
| `metadata.json` | format and version of Megatron's checkpoint |
| `common.pt` | layout, number of updates, schedule, adapter settings |
| `config_and_tokenizer/` | configuration and tokenizer files, for `python -m model_converters to-hf` |

Megatron's `dist_checkpointing.load` can read the model. Optimizer state is saved and loaded by this package, because
Megatron's state_dict of optimizers depends on the layout (optimizer_state.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.errors import CheckpointError, McoreRLError
from mcore_rl.megatron.checkpoint.blocks import blocks_to_load, reference_blocks
from mcore_rl.megatron.checkpoint.format_files import read_common
from mcore_rl.megatron.checkpoint.objects import load_extra_states, restore_random_state
from mcore_rl.megatron.checkpoint.reader import (
    check_adapters,
    check_fit,
    check_reference_kept,
    raise_on_every_rank,
    read_blocks,
    verify_files,
)
from mcore_rl.megatron.optim.optimizer_state import set_updates_done
from mcore_rl.resolved.adapters import adapter_identity
from mcore_rl.types import SavedFile
from model_converters.dcp.metadata import read_metadata
from model_converters.dcp.reader import DcpReader
from model_converters.errors import ConversionError

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.trained_model import TrainedModel


def load_checkpoint(directory: str, model: TrainedModel, files: Sequence[SavedFile] = ()) -> None:
    """Restore the saved state, bitwise equal in any layout except for random streams (objects.py). First compares
    `files` with their checksums.

    Raises: DamagedCheckpointError, or CheckpointError if the checkpoint does not fit the model; nothing was loaded
    then.
    Collective: all ranks.
    """
    verify_files(Path(directory), files)
    problem: McoreRLError | None = None
    try:
        common = read_common(directory)
        reader = DcpReader(Path(directory), read_metadata(Path(directory)))
    except (ConversionError, CheckpointError) as error:
        problem = CheckpointError(str(error))
    raise_on_every_rank(problem)
    reference = model.saved_reference
    check_reference_kept(directory, reader.shapes, kept_here=reference is not None)
    check_adapters(directory, common.get("adapters"), adapter_identity(model.role.section.lora, model.hf_config))
    model.memory.load("params", "optimizer")
    blocks = blocks_to_load(model.chunks, model.optimizer)
    if reference is not None:
        reference.memory.load("params")
        blocks += reference_blocks(reference.chunks, to_save=False)
    # All checks precede the first write, so that a rejected checkpoint leaves the state unchanged.
    check_fit(reader, blocks, model.device)
    try:
        read_blocks(reader, blocks)
        load_extra_states(model.chunks, reader)
        if reference is not None:
            reference.memory.offload()
        set_updates_done(model.optimizer, common["optimizer_updates"])
        model.scheduler.load_state_dict(common["scheduler"])
        same_layout = common["layout"] == asdict(model.layout)
        restore_random_state(model, reader, same_layout=same_layout, updates_done=common["optimizer_updates"])
    except (ConversionError, KeyError) as error:
        raise CheckpointError(f"{directory} cannot be read: {error}") from error
