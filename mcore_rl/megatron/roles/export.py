"""Export of the live weights as an HF checkpoint, and of LoRA adapters in PEFT's format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mcore_rl.megatron.lora.adapters import adapter_parameters
from mcore_rl.resolved.adapters import base_rows, bound_adapters, targets_of
from model_converters.hf.adapter_writer import adapter_config, write_adapter
from model_converters.hf.io import HFWriter
from model_converters.hf.value_head import classifier_config
from model_converters.mapping.placement import TensorPlan
from model_converters.mapping.plan import export_pieces, export_plan
from model_converters.mapping.table import bind

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.actor import MegatronActor

_Piece = tuple[str, int, int, torch.Tensor]
"""HF name, dim, start along it, values."""


def export_hf(actor: MegatronActor, directory: str, source: str) -> None:
    """Write `directory` atomically, with the trained model's config.json and the tokenizer files of `source`. A reward
    model is written as transformers' sequence classification with one label. Every rank writes its own slices; nothing
    is gathered.

    Collective: all ranks, on a shared file system.
    Raises: ConversionError.
    """
    actor.gather_parameters()
    plans, scores = actor.export_plan(), actor.objective.needs.scores
    with HFWriter(directory) as writer:
        if actor.rank == 0:
            writer.begin(plans)
        # Rank 0 creates the files before other ranks open them.
        dist.barrier()
        if actor.rank != 0:
            writer.attach(plans)
        for plan, piece, tensor in export_pieces(plans, actor.tensors(), actor.rank):
            writer.write(plan, piece, tensor)
        if actor.rank != 0:
            writer.close()
        # All slices must be written before the directory gets its final name.
        dist.barrier()
        if actor.rank == 0:
            writer.finish(source, classifier_config(actor.hf_config) if scores else actor.hf_config)
    dist.barrier()


def adapter_plan(actor: MegatronActor) -> list[TensorPlan]:
    """List every adapter tensor under PEFT's name, with the ranks that write its slices. Not collective."""
    dtype = next(actor.chunks[0].parameters()).dtype
    bound = bound_adapters(actor.config.actor.lora, actor.hf_config, dtype, actor.layout)
    names = {name for row in bound for name in row.hf}
    base = bind(base_rows(actor.hf_config, actor.layout), actor.hf_config, dtype)
    plans = export_plan([*base, *bound], actor.layout)
    return [plan for plan in plans if plan.hf_name in names]


def export_adapter(actor: MegatronActor, directory: str, source: str) -> None:
    """Write the adapters atomically. Rank 0 gathers them, because they are small.

    `source` is the HF directory of the base model.

    Collective: all ranks.
    Raises: ConversionError.
    """
    actor.gather_parameters()
    plans, lora = adapter_plan(actor), actor.config.actor.lora
    parameters = {factor.bound.mcore: parameter for factor, parameter in adapter_parameters(actor.chunks)}
    rank_pieces = [
        # A clone: pickling a view would send its whole storage.
        (plan.hf_name, piece.dim, piece.start, tensor.detach().cpu().clone())
        for plan, piece, tensor in export_pieces(plans, parameters, actor.rank)
    ]
    gathered: list[list[_Piece]] | None = [[]] * dist.get_world_size() if actor.rank == 0 else None
    dist.gather_object(rank_pieces, gathered)
    if gathered is None:
        return
    tensors = {plan.hf_name: torch.empty(plan.shape, dtype=plan.dtype) for plan in plans}
    for name, dim, start, part in (piece for pieces in gathered for piece in pieces):
        tensors[name].narrow(dim, start, part.shape[dim]).copy_(part)
    targets = targets_of(lora, actor.hf_config)
    config = adapter_config(rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora, target_modules=targets, base=source)
    write_adapter(directory, tensors, config)
