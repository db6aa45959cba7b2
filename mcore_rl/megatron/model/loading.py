"""Loading of HF weights into a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_rl.config.roles import POLICY
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.model.names import canonical_tensors
from mcore_rl.megatron.model.output import unwrap
from model_converters.errors import ConversionError
from model_converters.families.parts.mtp import resolve_copies, resolve_mtp
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.loader import load_tensors
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.table import bind


def load_hf(
    chunks: Sequence[torch.nn.Module], directory: str | Path, layout: TrainLayout, key: str = POLICY.checkpoint
) -> None:
    """Load this rank's slices of every tensor into the model, in place. `key` names the directory in errors.

    Names and shapes of model and directory must match in both directions; this is checked before any data is read.
    Multi-token-prediction tensors are skipped if the model has no such layers. Not collective: each rank reads its own
    slices. Load before the optimizer is built, because the optimizer copies the weights.

    Raises: ConfigError that lists missing, unknown, truncated or misshapen tensors.
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
        raise ConfigError(f"{key}={directory}: {error}") from error
