"""Writing of a rank's part of a checkpoint, and of the metadata by rank 0.

The constructor plans the files and, for an asynchronous save, copies the tensors while training is paused. Any thread
can then write the files. When all ranks have written, rank 0 adds the metadata. No collectives are used, so a thread
may write during training; the caller passes the ranks' reports (locations of blocks) to rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mcore_rl.data.checksum import Crc32, saved_file
from mcore_rl.errors import CheckpointError
from mcore_rl.megatron.checkpoint.blocks import blocks_to_save, frozen_blocks
from mcore_rl.megatron.checkpoint.format_files import CommonState, saved_layout, write_format_files
from mcore_rl.megatron.checkpoint.objects import extra_states, random_state_object
from mcore_rl.megatron.optim.optimizer_state import updates_done
from mcore_rl.resolved.adapters import adapter_identity
from mcore_rl.types import SavedFile, SavedState
from mcore_rl.types.json import JsonObject
from model_converters.dcp.blocks import CheckpointChunk, ShardedRankState, StateObject
from model_converters.dcp.metadata import METADATA_NAME
from model_converters.dcp.partial_checkpoint import Span
from model_converters.dcp.writer import FileEntry, PlannedFile, plan_files, plan_metadata, write_file, write_metadata
from model_converters.durable_files import sync
from model_converters.errors import ConversionError
from model_converters.hf.side_files import HF_FOLDER, copy_side_files

if TYPE_CHECKING:
    from mcore_rl.megatron.roles.rank_model import TrainedModel

MAX_FILE_BYTES = 2 * 2**30
_VERSIONED = ("mcore-rl", "megatron-core", "torch")


@dataclass(frozen=True)
class RankReport:
    """Files written by a rank, and the location of each entry in them."""

    saved: tuple[SavedFile, ...]
    planned: tuple[PlannedFile, ...]
    spans: Mapping[str, Sequence[Span]]


class CheckpointWriter:
    """Writer of a rank's files. With `snapshot` the constructor copies the tensors to host memory, so that training may
    continue during `write`; without it they must not change before `write` returns.

    Not collective.
    """

    def __init__(self, directory: str, model: TrainedModel, *, snapshot: bool) -> None:
        self.directory = Path(directory)
        model.memory.load("params", "optimizer")
        blocks = blocks_to_save(model.chunks, model.optimizer) + frozen_blocks(model, to_save=True)
        self._views = {(block.chunk.key, block.chunk.stored): block.view for block in blocks}
        assert len(self._views) == len(blocks), "a block would be saved twice"
        self._copied = snapshot
        if snapshot:
            self._views = {place: _copy(view) for place, view in self._views.items()}
        objects = (random_state_object(model), *extra_states(model.chunks))
        state = ShardedRankState(tuple(block.chunk for block in blocks), objects, {})
        dtypes = {block.chunk.mcore_name: block.view.dtype for block in blocks}
        self._files = tuple(plan_files(model.rank, state, dtypes, MAX_FILE_BYTES))
        self._side_files = model.role.model.hf_path, model.hf_config
        # Read now: training may continue while the files are written.
        self._common: CommonState = {
            "layout": saved_layout(model.layout),
            "adapters": adapter_identity(model.role.section.lora, model.hf_config),
            "optimizer_updates": updates_done(model.optimizer),
            "scheduler": model.scheduler.state_dict(),
            "loss_scale": None if model.loss_scaler is None else model.loss_scaler.state(),
        }
        self._dtype = model.role.model.dtype

    def write(self) -> RankReport:
        """Write this rank's files, sync them to disk, and release the tensors.

        Raises: OSError that names the file, for example if the disk is full; CheckpointError.
        """
        saved, spans = [], {}
        for file in self._files:
            crc = Crc32()
            with _path_in_errors(self.directory / file.name):
                spans[file.name] = write_file(self.directory, file, self._tensor, lambda _: None, on_write=crc.update)
            saved.append(SavedFile(file.name, crc.num_bytes, crc.value))
        # The writer lives until `finish`; a snapshot would occupy host memory until then.
        self._views.clear()
        return RankReport(tuple(saved), tuple(_without_contents(file) for file in self._files), spans)

    def finish(self, reports: Sequence[RankReport]) -> SavedState:
        """Write the metadata on rank 0, after all ranks have written their files.

        Raises: CheckpointError if the ranks did not write every tensor exactly once; OSError.
        """
        planned = [file for report in reports for file in report.planned]
        spans = {name: places for report in reports for name, places in report.spans.items()}
        source, hf_config = self._side_files
        with _path_in_errors(self.directory):
            metadata = plan_metadata(planned)
            write_metadata(self.directory, metadata, planned, spans)
            names = [METADATA_NAME, *write_format_files(self.directory, self._common)]
            copy_side_files(source, self.directory / HF_FOLDER, hf_config)
        # The metadata must be on disk before the caller marks the checkpoint as complete.
        for name in names:
            sync(self.directory / name)
        names += sorted(str(file.relative_to(self.directory)) for file in (self.directory / HF_FOLDER).iterdir())
        added = [saved_file(self.directory, name) for name in names]
        description: JsonObject = {
            "world_size": len(reports),
            "layout": self._common["layout"],
            "dtype": self._dtype,
            "versions": {name: version(name) for name in _VERSIONED},
            "tensors": {
                key: [str(stored.properties.dtype).removeprefix("torch."), list(stored.size)]
                for key, stored in sorted(metadata.state_dict_metadata.items())
                # Objects, such as random states, have no size.
                if hasattr(stored, "size")
            },
        }
        return SavedState((*(file for report in reports for file in report.saved), *added), description)

    def _tensor(self, chunk: CheckpointChunk) -> torch.Tensor:
        view = self._views[chunk.key, chunk.stored]
        return view if self._copied else _copy(view)


@contextmanager
def _path_in_errors(path: Path) -> Iterator[None]:
    """Return a context that adds `path` to errors raised while writing."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    except (RuntimeError, ConversionError) as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def _copy(view: torch.Tensor) -> torch.Tensor:
    # In a new storage: torch.save would write the whole storage of a view.
    return view.detach().to("cpu", copy=True).contiguous()


def _without_contents(file: PlannedFile) -> PlannedFile:
    """Remove the contents of objects, which rank 0 does not need."""
    entries = (
        FileEntry(StateObject(entry.content.key, b""), None) if isinstance(entry.content, StateObject) else entry
        for entry in file.entries
    )
    return replace(file, entries=tuple(entries))
