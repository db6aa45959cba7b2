"""Loading of HF weights into a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_rl.config.roles import POLICY, ModelRole
from mcore_rl.data.read_progress import READS
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.model.names import canonical_tensors
from mcore_rl.megatron.model.output import unwrap
from mcore_rl.megatron.model.value_model import initialize_head
from model_converters.errors import ConversionError
from model_converters.families.parts.mtp import resolve_copies, resolve_mtp
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.loader import load_tensors
from model_converters.hf.value_head import SCORE, VALUE_HEAD, resolve_value_head, value_model_config
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.separate import trainer_rows
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
    keep = bool(unwrap(chunks[0]).config.mtp_num_layers)
    tensors = canonical_tensors(chunks)
    with _reading(directory, key) as checkpoint:
        config, dropped = resolve_mtp(checkpoint.config, checkpoint.shapes, keep=keep)
        rows = bind(trainer_rows(checkpoint.family.rows(config), layout), config, _dtype(tensors))
        bound, _ = resolve_copies(rows, checkpoint.shapes)
        load_tensors(checkpoint, bound, layout, dist.get_rank(), tensors, dropped=dropped, on_read=_show_read)


def fill_value_model(chunks: Sequence[torch.nn.Module], role: ModelRole, layout: TrainLayout, seed: int) -> None:
    """Initialize the head of a value model that is trained, with `seed`, and load the role's checkpoint unless
    model.random_init is set (see load_value_model)."""
    if role.model.random_init:
        initialize_head(chunks, seed)
    else:
        load_value_model(chunks, role.model.hf_path, layout, seed, role.checkpoint)


def load_value_model(
    chunks: Sequence[torch.nn.Module], directory: str | Path, layout: TrainLayout, seed: int | None, key: str
) -> None:
    """Load an HF classification model with one label (its head becomes the value head) or an HF causal model (the head
    is initialized with `seed`), like load_hf.

    Raises: ConfigError that lists missing, unknown, truncated or misshapen tensors; also for a causal model without
    `seed`.
    """
    if seed is not None:
        initialize_head(chunks, seed)
    tensors = canonical_tensors(chunks)
    with _reading(directory, key) as checkpoint:
        rows, dropped = resolve_value_head(checkpoint, required=seed is None)
        bound = bind(trainer_rows(rows, layout), value_model_config(checkpoint.config), _dtype(tensors))
        # A causal model has no head: keep the initialized one.
        if all(row.mcore != VALUE_HEAD for row in rows):
            tensors.pop(SCORE if layout.hf_tensors else VALUE_HEAD, None)
        load_tensors(checkpoint, bound, layout, dist.get_rank(), tensors, dropped=dropped, on_read=_show_read)


def _show_read(done: int, total: int) -> None:
    READS.update("loading weights", done, total)


@contextmanager
def _reading(directory: str | Path, key: str) -> Iterator[HFCheckpoint]:
    try:
        with HFCheckpoint(directory) as checkpoint, torch.no_grad():
            yield checkpoint
    except ConversionError as error:
        raise ConfigError(f"{key}={directory}: {error}") from error


def _dtype(tensors: dict[str, torch.Tensor]) -> torch.dtype:
    return next(iter(tensors.values())).dtype
