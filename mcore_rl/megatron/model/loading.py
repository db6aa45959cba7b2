"""Fills a live model from an HF directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_rl.config.names import role_key
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.model.names import canonical_tensors
from mcore_rl.megatron.model.output import unwrap
from model_converters.errors import ConversionError
from model_converters.families.parts.mtp import resolve_copies, resolve_mtp
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.loader import load_tensors
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.table import bind


def load_hf(chunks: Sequence[torch.nn.Module], directory: str | Path, layout: TrainLayout) -> None:
    """Reads this rank's slices of every tensor into the model, in place; the two must agree name by name and shape by
    shape, both ways, before anything is read. Tensors of multi-token prediction are left out where the model has no
    such layers.

    Each rank reads for itself; no collective. Load before the optimizer is built: it copies the weights.

    Raises: ConfigError saying what is missing, unknown, truncated or misshapen.
    """
    tensors = canonical_tensors(chunks)
    dtype = next(iter(tensors.values())).dtype
    keep = bool(unwrap(chunks[0]).config.mtp_num_layers)
    try:
        with HFCheckpoint(directory) as checkpoint, torch.no_grad():
            config, dropped = resolve_mtp(checkpoint.config, checkpoint.shapes, keep=keep)
            bound, _ = resolve_copies(bind(checkpoint.family.rows(config), config, dtype), checkpoint.shapes)
            load_tensors(checkpoint, bound, layout, dist.get_rank(), tensors, dropped=dropped)
    except ConversionError as error:
        raise ConfigError(f"{role_key('model.hf_path')}={directory}: {error}") from error
