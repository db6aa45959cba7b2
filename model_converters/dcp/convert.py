"""HF directories to megatron-core distributed checkpoints, and back.

Keys, global shapes and offsets are megatron's own, asked of its model in the layout, so that any other layout loads
what is written here, and what a trainer saved in any layout is read here. Functions of this module and of logits.py are
the only places of the converters that know mcore_rl.megatron.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch.distributed.checkpoint import Metadata

from model_converters.dcp.block_source import ChunkSource, stored_dtypes
from model_converters.dcp.blocks import CheckpointChunk, Naming, ShardedRankState
from model_converters.dcp.logits import Compare, compare_logits, require_same_logits, should_compare_logits
from model_converters.dcp.metadata import read_metadata
from model_converters.dcp.model import McoreCheckpoint, plan_bytes
from model_converters.dcp.partial_checkpoint import PartialCheckpoint, Span
from model_converters.dcp.reader import DcpReader
from model_converters.dcp.source_record import read_record, write_record
from model_converters.dcp.verify import Certificate, compare
from model_converters.dcp.writer import PlannedFile, plan_files, plan_metadata, space_needed, write_file, write_metadata
from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.families.parts.hf_config import read_hf_config
from model_converters.families.parts.mtp import Copies, resolve_copies, resolve_mtp, without_mtp
from model_converters.hf.fp8_export import Fp8Export
from model_converters.hf.io import HFCheckpoint, HFWriter
from model_converters.hf.loader import check_copies
from model_converters.hf.side_files import HF_FOLDER, copy_side_files, side_files, side_files_in
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import TensorPlan
from model_converters.mapping.plan import check_complete, load_plan
from model_converters.mapping.table import BoundRow, bind
from model_converters.progress import ByteProgress

MAX_FILE_BYTES = 2 * 2**30
MAX_SHARD_BYTES = 5 * 2**30


def to_mcore(
    hf: Path,
    out: Path,
    layout: TrainLayout,
    *,
    lora: Path | None = None,
    drop_mtp: bool = False,
    mtp_copies: Copies = "equal",
    max_file_bytes: int = MAX_FILE_BYTES,
    logits: Compare = "never",
) -> None:
    """Writes the HF directory `hf` as a distributed checkpoint `out`, as the ranks of `layout` would, one after the
    other; tensors keep their dtype, FP8 ones become what they stand for. In memory is one tensor of one rank at a time.

    lora: directory of a PEFT adapter that is merged into the weights. drop_mtp: leave multi-token prediction out.
    mtp_copies: see mtp.resolve_copies. logits: whether a few tokens go through
    transformers' model of `hf` and megatron's of the checkpoint, which is let go if they differ; "auto": where both fit
    into memory.

    A killed conversion leaves `.<out>.partial`, and the same call finishes it; after an error in the input nothing is
    left.

    Raises: ConversionError; LayoutError.
    """
    with HFCheckpoint(hf, lora) as source:
        _check_config("--hf", hf, source.config)
        side_files(hf)
        compared = should_compare_logits(source, logits, lora)
        conversion = _plan(source, layout, max_file_bytes, keep_mtp=not drop_mtp, mtp_copies=mtp_copies)
        partial = PartialCheckpoint(out)
        spans = partial.open(_identity(conversion, lora, max_file_bytes))
        _check_space(partial, conversion.files, spans)
        try:
            _write(partial, conversion, spans)
            write_metadata(partial.directory, conversion.metadata, conversion.files, spans)
            copy_side_files(hf, partial.directory / HF_FOLDER, conversion.config)
            write_record(partial.directory, source, _bound(conversion.config))
            _write_format_files(partial.directory)
            if compared:
                require_same_logits(hf, partial.directory, conversion.config)
            partial.publish()
        except ConversionError:
            partial.discard()
            raise
        except OSError as error:
            problem = f"{out} cannot be written: {error.strerror or error}"
            raise ConversionError(
                f"{problem}; {partial.directory} keeps what is done: the same command goes on"
            ) from error
        finally:
            partial.close()


def _check_config(flag: str, directory: Path, config: dict[str, Any]) -> None:
    """Raises: ConversionError naming the flag and the field for a configuration that no model is built from."""
    try:
        family_for(config).model_arguments(config)
    except ConversionError as error:
        raise ConversionError(f"{flag} {directory}: {error}") from error


@dataclass(frozen=True)
class _Conversion:
    source: HFCheckpoint
    config: dict[str, Any]
    bound: Sequence[BoundRow]
    layout: TrainLayout
    dtypes: Mapping[str, torch.dtype]
    states: Sequence[ShardedRankState]
    files: Sequence[PlannedFile]
    metadata: Metadata


def _plan(
    source: HFCheckpoint, layout: TrainLayout, max_file_bytes: int, *, keep_mtp: bool, mtp_copies: Copies
) -> _Conversion:
    """Everything that can be wrong with the input is found here, before anything is written."""
    config, dropped = resolve_mtp(source.config, source.shapes, keep=keep_mtp)
    bound, dropped_copies = resolve_copies(_bound(config), source.shapes, mtp_copies)
    check_complete(bound, source.shapes, dropped=(*dropped, *dropped_copies))
    check_copies(source, bound)
    _print_notes(source, dropped, dropped_copies)
    source.close()  # it opens again; the pages that were compared go
    load_plan(bound, layout, 0)  # refuses a layout that does not divide the model
    dtypes = stored_dtypes(source, bound)
    states = rank_states(config, layout)
    files = [f for rank, state in enumerate(states) for f in plan_files(rank, state, dtypes, max_file_bytes)]
    return _Conversion(source, config, bound, layout, dtypes, states, files, plan_metadata(files))


def _print_notes(source: HFCheckpoint, dropped: Sequence[str], dropped_copies: Sequence[str]) -> None:
    notes = list(source.unlisted.notes)
    if dropped:
        notes.append(f"{len(dropped)} tensors of multi-token prediction are left out")
    notes += [f"{name} is left out: the model's own tensor takes its place" for name in dropped_copies]
    for note in notes:
        print(f"{source.directory}: {note}", file=sys.stderr)


def _identity(conversion: _Conversion, lora: Path | None, max_file_bytes: int) -> dict[str, Any]:
    """What a conversion must have in common with the one that it continues."""
    planned = {file.name: file.num_bytes for file in conversion.files}
    return {
        "source": _fingerprint(conversion.source.directory),
        "adapter": _fingerprint(lora) if lora is not None else None,
        "layout": asdict(conversion.layout),
        "config": conversion.config,
        "files": {"max_bytes": max_file_bytes, "planned": planned},
    }


def _fingerprint(directory: Path) -> dict[str, Any]:
    files = sorted({*directory.glob("*config.json"), *directory.glob("*.safetensors*")})
    sizes_and_times = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return {"directory": str(directory.absolute()), "files": sizes_and_times}


def _check_space(
    partial: PartialCheckpoint, files: Sequence[PlannedFile], finished: Mapping[str, Sequence[Span]]
) -> None:
    needed = space_needed(file for file in files if file.name not in finished)
    # A file that was cut off is written anew in its place.
    reused = sum(f.stat().st_size for f in partial.directory.glob("*.distcp") if f.name not in finished)
    free = shutil.disk_usage(partial.directory).free + reused
    if needed > free:
        # What an earlier conversion has done is worth more than the space it takes.
        partial.close() if finished else partial.discard()
        raise ConversionError(
            f"{partial.target}: {needed / 2**30:.2f} GiB are needed, the disk has {free / 2**30:.2f} GiB free"
        )


def _write(partial: PartialCheckpoint, conversion: _Conversion, spans: dict[str, list[Span]]) -> None:
    """Writes the files that are not in `spans`, and adds them."""
    files = conversion.files
    done = sum(file.num_bytes for file in files if file.name in spans)
    if spans:
        print(f"{partial.target}: {len(spans)} of {len(files)} files are there already", file=sys.stderr)
    with ByteProgress("to-mcore", sum(file.num_bytes for file in files), done) as progress:
        rank = -1
        for file in files:
            if file.name in spans:
                continue
            if file.rank != rank:
                rank = file.rank
                loads = load_plan(conversion.bound, conversion.layout, rank)
                chunks = ChunkSource(conversion.source, loads, conversion.dtypes, conversion.states[rank])
            spans[file.name] = write_file(partial.directory, file, chunks.read, progress.advance)
            partial.note(file.name, spans[file.name])


def _bound(config: dict[str, Any]) -> list[BoundRow]:
    # The dtypes of the table are those of no file here: every tensor keeps its own.
    return bind(family_for(config).rows(config), config, torch.bfloat16)


def rank_states(config: dict[str, Any], layout: TrainLayout, *, naming: Naming = "default") -> list[ShardedRankState]:
    """What every rank of `layout` writes, in megatron's names; see mcore_rl.megatron.model.sharded.rank_state.

    Raises: ConversionError.
    """
    from mcore_rl.errors import McoreRLError

    try:
        with warnings.catch_warnings():
            # megatron's: every optional package that is absent, every option of the model that has no effect.
            warnings.simplefilter("ignore")
            from mcore_rl.megatron.model.sharded import rank_state

            return [rank_state(config, layout, rank, naming=naming) for rank in range(layout.world_size)]
    except McoreRLError as error:
        raise ConversionError(str(error)) from error


def _write_format_files(directory: Path) -> None:
    from mcore_rl.megatron.checkpoint.format_files import write_format_files

    write_format_files(directory)


def to_hf(
    ckpt: Path, out: Path, *, hf: Path | None = None, fp8: bool = False, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes a distributed checkpoint of any layout as an HF directory `out`, one tensor in memory at a time; tensors
    keep their dtype. Optimizer state beside the model is left out.

    hf: the directory that holds config.json and the tokenizer files; None: the one inside the checkpoint. fp8: the
    weights of linear layers as FP8 codes and scales.

    Raises: ConversionError; then there is no `out`.
    """
    described = side_files_of(ckpt, hf)
    config = read_hf_config(described)
    _check_config("--ckpt" if hf is None else "--hf", described, config)
    side_files(described)
    checkpoint = open_checkpoint(ckpt, config)
    checkpoint.require_complete()
    record = read_record(ckpt)
    # The record may only leave out copies.
    sources = [plan for plan in checkpoint.plans if plan.hf_name not in record.absent & checkpoint.repeated]
    scales = {name: stored.dtype for name, stored in record.scales.items()}
    export = Fp8Export(checkpoint.config, _bound(checkpoint.config), scales, record.scales_of)
    plans = export.plans(sources) if fp8 else sources
    by_name = {plan.hf_name: plan for plan in plans}
    with HFWriter(out, max_shard_bytes) as writer, ByteProgress("to-hf", sum(map(plan_bytes, sources))) as progress:
        writer.begin(plans)
        for source in sources:
            _export(writer, by_name, source.hf_name, checkpoint, export)
            progress.advance(plan_bytes(source))
        writer.finish(described, checkpoint.config)


def _export(
    writer: HFWriter, plans: Mapping[str, TensorPlan], name: str, checkpoint: McoreCheckpoint, export: Fp8Export
) -> None:
    """A function of its own, so that no tensor lives on while the next one is read."""
    for plan, piece, tensor in export.encoded(plans, name, checkpoint.read(name)):
        writer.write(plan, piece, tensor)


def side_files_of(ckpt: Path, hf: Path | None = None) -> Path:
    """The directory with the config.json of a checkpoint: `hf` when given, else the checkpoint's own.

    Raises: ConversionError.
    """
    own = side_files_in(ckpt)
    if hf is None and not (own / "config.json").exists():
        read_metadata(ckpt)  # what is no checkpoint at all is refused as such
        raise ConversionError(
            f"{own / 'config.json'} does not exist: this checkpoint does not say which model it is of; "
            "give the HF directory with --hf"
        )
    return hf or own


def open_checkpoint(ckpt: Path, config: dict[str, Any]) -> McoreCheckpoint:
    """The checkpoint, in whichever naming of layers and experts fits it best, and without multi-token prediction when
    it holds nothing of it: trainers do not keep it.

    Raises: ConversionError.
    """
    metadata = read_metadata(ckpt)
    if not any(key.startswith("mtp.") for key in metadata.state_dict_metadata):
        config = without_mtp(config)
    best: tuple[int, Sequence[CheckpointChunk]] | None = None
    for naming in get_args(Naming):
        (state,) = rank_states(config, TrainLayout(1), naming=naming)
        absent = sum(chunk.key not in metadata.state_dict_metadata for chunk in state.chunks)
        if best is None or absent < best[0]:
            best = absent, state.chunks
        if absent == 0:
            break
    assert best is not None
    return McoreCheckpoint(config, _bound(config), best[1], DcpReader(ckpt, metadata))


def verify(
    hf: Path,
    ckpt: Path,
    *,
    lora: Path | None = None,
    drop_mtp: bool = False,
    mtp_copies: Copies = "equal",
    logits: bool = False,
) -> Certificate:
    """Compares every tensor of an HF directory, merged with the adapter `lora`, with a distributed checkpoint, and what
    the config.json of both describe; with `logits` also what the two models compute, each by its own config.json, when
    every tensor is there. Tensors that `drop_mtp` and `mtp_copies` leave out of a conversion are not compared.

    Raises: ConversionError when either side is no model at all.
    """
    if lora is not None and logits:
        raise ConversionError("--logits runs the HF model as it is: it cannot be compared with --lora")
    with HFCheckpoint(hf, lora) as source:
        _check_config("--hf", hf, source.config)
        own = side_files_in(ckpt)
        config = read_hf_config(own) if own.is_dir() else source.config
        _check_config("--ckpt", own, config)
        checkpoint = open_checkpoint(ckpt, config)
        source.unlisted.check_copies()
        resolved, dropped = resolve_mtp(source.config, source.shapes, keep=not drop_mtp)
        _, dropped_copies = resolve_copies(_bound(resolved), source.shapes, mtp_copies)
        _print_notes(source, dropped, dropped_copies)
        certificate = compare(source, checkpoint, dropped={*dropped, *dropped_copies})
    if not logits or certificate.missing:
        return certificate
    return replace(certificate, logits=compare_logits(hf, ckpt, checkpoint.config))
