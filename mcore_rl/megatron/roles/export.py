"""Export of the live weights as an HF checkpoint. Every rank writes its own slices; nothing is gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from model_converters.hf.io import HFWriter
from model_converters.mapping.plan import export_pieces

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.actor import MegatronActor


def export_hf(actor: MegatronActor, directory: str, source: str) -> None:
    """Write `directory` atomically, with the trained model's config.json and the tokenizer files of `source`.

    Collective: all ranks, on a shared file system.
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
