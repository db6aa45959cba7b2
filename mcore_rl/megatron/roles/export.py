"""The live weights as an HF checkpoint: every rank writes its own pieces to their place, nothing is gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from model_converters.hf.io import HFWriter
from model_converters.mapping.plan import export_pieces

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.actor import MegatronActor


def export_hf(actor: MegatronActor, directory: str, source: str) -> None:
    """Writes `directory` atomically, with tokenizer files copied from `source` and the configuration that was trained.

    Collective: all ranks; they must see the same file system.
    Raises: ConversionError.
    """
    actor.gather_parameters()
    plans = actor.export_plan()
    with HFWriter(directory) as writer:
        if actor.rank == 0:
            writer.begin(plans)
        dist.barrier()
        if actor.rank != 0:
            writer.attach(plans)
        for plan, piece, tensor in export_pieces(plans, actor.tensors(), actor.rank):
            writer.write(plan, piece, tensor)
        if actor.rank != 0:
            writer.close()
        dist.barrier()
        if actor.rank == 0:
            writer.finish(source, actor.hf_config)
    dist.barrier()
