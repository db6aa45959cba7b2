"""Record of a conversion's source, stored next to config.json in the checkpoint.

It lists the table's tensors that the source lacks and keeps the scales of its FP8 blocks, so that an unchanged model is
exported bit for bit as it was released. Scales cannot be recomputed from the values: a block whose largest code is 224
has two possible power-of-two scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from model_converters.durable_files import write_json
from model_converters.errors import ConversionError
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.shards import StoredTensor, TensorFiles, read_header, write_tensors
from model_converters.hf.side_files import HF_FOLDER, side_files_in
from model_converters.inputs import read_object
from model_converters.mapping.table import BoundRow

_ABSENT_FILE, _SCALES_FILE = "source_tensors.json", "source_scales.safetensors"


@dataclass(frozen=True)
class SourceRecord:
    """Optional properties of a conversion's source.

    absent: HF tensors of the table that the source lacks.
    scales: name of an FP8 weight -> location of its scales.
    """

    absent: frozenset[str] = frozenset()
    scales: Mapping[str, StoredTensor] = field(default_factory=dict)

    def scales_of(self, name: str) -> torch.Tensor | None:
        """Read the original scales of a weight; None if it was not FP8."""
        stored = self.scales.get(name)
        if stored is None:
            return None
        with closing(TensorFiles()) as files:
            return files.read(name, stored)


def write_record(directory: Path, source: HFCheckpoint, bound: Sequence[BoundRow]) -> None:
    """Write the record of `source` into a checkpoint; `bound` is the whole table of the model.

    Raises: OSError; ConversionError.
    """
    folder = directory / HF_FOLDER
    # Only copies (Row.repeats) can be absent: check_complete rejects a source that lacks any other tensor.
    absent = sorted(row.hf[0] for row in bound if row.row.repeats and row.hf[0] not in source.shapes)
    if absent:
        write_json(folder / _ABSENT_FILE, {"absent": absent})
    if scales := source.stored_scales():
        write_tensors(folder / _SCALES_FILE, scales)


def read_record(directory: Path) -> SourceRecord:
    """Read the record of a checkpoint; it is empty for checkpoints saved by a trainer.

    Raises: ConversionError if the record is damaged.
    """
    folder = side_files_in(directory)
    scales = read_header(folder / _SCALES_FILE) if (folder / _SCALES_FILE).exists() else {}
    return SourceRecord(frozenset(_read_absent(folder / _ABSENT_FILE)), scales)


def _read_absent(file: Path) -> list[str]:
    try:
        absent = read_object(file).get("absent")
    except FileNotFoundError:
        return []
    if not isinstance(absent, list) or not all(isinstance(name, str) for name in absent):
        raise ConversionError(f"{file} is damaged: it must list the absent tensors")
    return absent
