"""Loading of a rank's parameters from an HF directory, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product

import torch

from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.plan import TensorLoad, load_plan, local_slice
from model_converters.mapping.table import BoundRow


def load_tensors(
    checkpoint: HFCheckpoint,
    bound: Sequence[BoundRow],
    layout: TrainLayout,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    dropped: Collection[str] = (),
    on_read: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fill this rank's mcore tensors (canonical name -> local tensor) in place, reading only the slices it owns.

    Names and shapes of the table, the checkpoint and `tensors` are compared before any data is read. `dropped`: tensors
    of the checkpoint that are ignored on purpose (see mtp.resolve_mtp). `on_read` receives the bytes of the filled
    slices and of all slices.
    Raises: ConversionError listing all differences; LayoutError.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_complete(bound, checkpoint.shapes, shapes, layout=layout, rank=rank, dropped=dropped)
    reads = []
    for load in load_plan(bound, layout, rank):
        target = tensors[load.mcore_name].detach()
        # No slice covers the padding of the vocabulary, and `tensors` may be uninitialised.
        if load.padded:
            target.zero_()
        for hf_name, piece in load.sources:
            reads.append((*checkpoint.position(hf_name), hf_name, piece, local_slice(target, piece)))
        _check_redundant(checkpoint, load)
    # Sort by file and offset for sequential disk reads.
    done, total = 0, sum(out.nbytes for *_, out in reads)
    on_read(done, total)
    for _, _, hf_name, piece, out in sorted(reads, key=lambda read: read[:2]):
        checkpoint.read_into(hf_name, out, dim=piece.dim, start=piece.start, rows=piece.rows)
        done += out.nbytes
        on_read(done, total)


def check_copies(checkpoint: HFCheckpoint, bound: Sequence[BoundRow]) -> None:
    """Compare all tensors that are stored twice, including copies in unlisted weight files.

    Raises: ConversionError naming a tensor that differs from its copy.
    """
    for load in load_plan(bound, TrainLayout(1), 0):
        _check_redundant(checkpoint, load)
    checkpoint.unlisted.check_copies()


def _check_redundant(checkpoint: HFCheckpoint, load: TensorLoad) -> None:
    """Compare the stored copies of a tensor with the tensors that `load` reads.

    Raises: ConversionError if they differ.
    """
    stored_copies = (name for name in load.copies if name in checkpoint.shapes)
    for hf_name, (own_name, piece) in product(stored_copies, load.sources):
        # Views of the mapped files: the comparison copies nothing, except FP8 and merged weights.
        source, other = (
            checkpoint.view(name, piece.dim, piece.start, piece.length, piece.rows) for name in (own_name, hf_name)
        )
        if not torch.equal(source, other):
            why = "config.json ties them; set tie_word_embeddings to false or remove the tensor"
            if hf_name not in load.bound.row.redundant:
                why = (
                    "megatron shares one tensor between multi-token prediction and the main model; --mtp-copies main "
                    "uses the main model's tensor, --drop-mtp drops the layer (in a run: actor.mtp_loss_coefficient=0)"
                )
            raise ConversionError(f"{checkpoint.directory}: {hf_name} differs from {own_name}, but {why}")
