"""HF directories that went through Megatron's layout and back, without Megatron: the converters alone."""

from __future__ import annotations

from pathlib import Path

import torch

from model_converters.hf.io import HFCheckpoint, HFWriter
from model_converters.hf.loader import load_tensors
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import export_pieces, export_plan, local_shapes
from model_converters.mapping.table import bind


def export_through(source: Path, target: Path, layout: TrainLayout) -> Path:
    """Every rank of `layout` in turn loads its slices of the float32 model in `source` and writes them to `target`."""
    with HFCheckpoint(source) as checkpoint, HFWriter(target, max_shard_bytes=20_000) as writer:
        bound = bind(checkpoint.family.rows(checkpoint.config), checkpoint.config, torch.float32)
        plans = export_plan(bound, layout)
        writer.begin(plans)
        for rank in range(layout.world_size):
            shapes = local_shapes(bound, layout, rank)
            local = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
            load_tensors(checkpoint, bound, layout, rank, local)
            for plan, piece, view in export_pieces(plans, local, rank):
                writer.write(plan, piece, view)
        writer.finish(source)
    return target
