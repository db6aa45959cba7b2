"""Conversion between HF directories and Megatron-Core distributed checkpoints, and verification of the result.

Keys, global shapes and offsets come from Megatron's own model, built in the requested layout. A converted checkpoint
can therefore be loaded in any other layout, and checkpoints that a trainer saved in any layout can be converted. Only
this module, logits.py and the command line import mcore_rl.megatron, inside functions.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from torch.distributed.checkpoint import Metadata

from model_converters.dcp.block_source import loads_by_name, read_chunk, stored_dtypes
from model_converters.dcp.blocks import CheckpointChunk, Naming, ShardedRankState
from model_converters.dcp.logits import Compare, compare_logits, megatron_errors, require_same_logits, should_compare
from model_converters.dcp.metadata import read_metadata
from model_converters.dcp.model import McoreCheckpoint
from model_converters.dcp.partial_checkpoint import PartialCheckpoint, Span
from model_converters.dcp.reader import DcpReader
from model_converters.dcp.source_record import read_record, write_record
from model_converters.dcp.verify import Certificate, compare
from model_converters.dcp.writer import PlannedFile, plan_files, plan_metadata, space_needed, write_file, write_metadata
from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.families.parts.hf_config import HFConfig, read_hf_config
from model_converters.families.parts.mtp import Copies, resolve_copies, resolve_mtp, without_mtp
from model_converters.hf.fp8_export import Fp8Export
from model_converters.hf.io import HFCheckpoint, HFWriter
from model_converters.hf.loader import check_copies
from model_converters.hf.side_files import HF_FOLDER, copy_side_files, side_files, side_files_in
from model_converters.hf.value_head import VALUE_HEAD, classifier_config, model_rows, value_model_config
from model_converters.hf.writer import plan_bytes
from model_converters.mapping.completeness import check_complete
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import TensorPlan
from model_converters.mapping.plan import load_plan
from model_converters.mapping.table import BoundRow, bind
from model_converters.progress import byte_progress

# A resumed conversion repeats at most one file of this size.
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
    """Convert the HF directory `hf` to a distributed checkpoint `out`, saved as by the ranks of `layout`.

    The ranks' files are written one after another, with one tensor in memory at a time. Tensors keep their dtype; FP8
    weights are dequantised.

    lora: directory of a PEFT adapter to merge into the weights.
    drop_mtp: drop the multi-token-prediction layers.
    mtp_copies: see mtp.Copies.
    logits: whether to compare the logits of transformers and Megatron on a few tokens. The checkpoint is discarded if
    they differ. "auto" compares if both models fit in memory.

    A killed conversion leaves `.<out>.partial`, and the same call resumes it. An error in the input leaves nothing.

    Raises: ConversionError; LayoutError.
    """
    with HFCheckpoint(hf, lora) as source:
        _check_config("--hf", hf, source.config)
        side_files(hf)
        compared = should_compare(source, logits, lora)
        conversion = _plan(source, layout, max_file_bytes, keep_mtp=not drop_mtp, mtp_copies=mtp_copies)
        # Nothing is written before this line.
        partial = PartialCheckpoint(out)
        spans = partial.open(_identity(conversion, lora, max_file_bytes))
        _check_space(partial, conversion.files, spans)
        try:
            _write(partial, conversion, spans)
            write_metadata(partial.directory, conversion.metadata, conversion.files, spans)
            copy_side_files(hf, partial.directory / HF_FOLDER, conversion.config)
            write_record(partial.directory, source, _bound(conversion.config))
            # rank_states has imported Megatron, without its warnings.
            from mcore_rl.megatron.checkpoint.format_files import write_format_files

            write_format_files(partial.directory)
            if compared:
                require_same_logits(hf, partial.directory, conversion.config)
            partial.publish()
        except ConversionError:
            partial.discard()
            raise
        except OSError as error:
            problem = f"{out} cannot be written: {error.strerror or error}"
            raise ConversionError(
                f"{problem}; {partial.directory} keeps the finished files: repeat the command to resume"
            ) from error
        finally:
            partial.close()


def _check_config(flag: str, directory: Path, config: HFConfig) -> None:
    """Reject a configuration from which no model can be built.

    Raises: ConversionError naming the flag and the field.
    """
    try:
        family_for(config).model_arguments(config)
    except ConversionError as error:
        raise ConversionError(f"{flag} {directory}: {error}") from error


@dataclass(frozen=True)
class _Conversion:
    source: HFCheckpoint
    config: dict[str, object]
    bound: Sequence[BoundRow]
    layout: TrainLayout
    dtypes: Mapping[str, torch.dtype]
    states: Sequence[ShardedRankState]
    files: Sequence[PlannedFile]
    metadata: Metadata


def _plan(
    source: HFCheckpoint, layout: TrainLayout, max_file_bytes: int, *, keep_mtp: bool, mtp_copies: Copies
) -> _Conversion:
    """Plan the conversion. All errors of the input are raised here, before anything is written."""
    config, dropped = resolve_mtp(source.config, source.shapes, keep=keep_mtp)
    bound, dropped_copies = resolve_copies(_bound(config), source.shapes, mtp_copies)
    check_complete(bound, source.shapes, dropped=(*dropped, *dropped_copies))
    check_copies(source, bound)
    _print_notes(source, dropped, dropped_copies)
    load_plan(bound, layout, 0)  # raises for a layout that does not divide the model
    dtypes = stored_dtypes(source, bound)
    states = rank_states(config, layout)
    files = [f for rank, state in enumerate(states) for f in plan_files(rank, state, dtypes, max_file_bytes)]
    return _Conversion(source, config, bound, layout, dtypes, states, files, plan_metadata(files))


def _print_notes(source: HFCheckpoint, dropped: Sequence[str], dropped_copies: Sequence[str]) -> None:
    notes = list(source.unlisted.notes)
    if source.ignored:
        others = f" and {len(source.ignored) - 1} others" if len(source.ignored) > 1 else ""
        notes.append(f"{source.ignored[0]}{others} are dropped: transformers does not read them either")
    if dropped:
        notes.append(f"{len(dropped)} tensors of multi-token prediction are dropped")
    notes += [f"{name} is dropped: the main model's tensor replaces it" for name in dropped_copies]
    for note in notes:
        print(f"{source.directory}: {note}", file=sys.stderr)


def _identity(conversion: _Conversion, lora: Path | None, max_file_bytes: int) -> dict[str, object]:
    """Return the properties that must be equal for a conversion to resume an earlier one."""
    planned = {file.name: file.num_bytes for file in conversion.files}
    return {
        "source": _fingerprint(conversion.source.directory),
        "adapter": _fingerprint(lora) if lora is not None else None,
        "layout": asdict(conversion.layout),
        "config": conversion.config,
        "files": {"max_bytes": max_file_bytes, "planned": planned},
    }


def _fingerprint(directory: Path) -> dict[str, object]:
    # Sizes and times instead of checksums: hashing a large model would take as long as converting it.
    files = sorted({*directory.glob("*config.json"), *directory.glob("*.safetensors*")})
    sizes_and_times = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return {"directory": str(directory.absolute()), "files": sizes_and_times}


def _check_space(
    partial: PartialCheckpoint, files: Sequence[PlannedFile], finished: Mapping[str, Sequence[Span]]
) -> None:
    needed = space_needed(file for file in files if file.name not in finished)
    # Unfinished files are overwritten, so their bytes count as free.
    reused = sum(f.stat().st_size for f in partial.directory.glob("*.distcp") if f.name not in finished)
    free = shutil.disk_usage(partial.directory).free + reused
    if needed > free:
        # Keep the finished files of an earlier call; discard a directory that this call has just created.
        partial.close() if finished else partial.discard()
        raise ConversionError(
            f"{partial.target}: the checkpoint needs {needed / 2**30:.2f} GiB, the disk has {free / 2**30:.2f} GiB free"
        )


def _write(partial: PartialCheckpoint, conversion: _Conversion, spans: dict[str, list[Span]]) -> None:
    """Write the files that are missing in `spans` and add them to it."""
    files = conversion.files
    done = sum(file.num_bytes for file in files if file.name in spans)
    if spans:
        print(f"{partial.target}: resuming; {len(spans)} of {len(files)} files are finished", file=sys.stderr)
    with byte_progress("to-mcore", sum(file.num_bytes for file in files), done) as advance:
        rank = -1
        for file in files:
            if file.name in spans:
                continue
            if file.rank != rank:
                rank = file.rank
                plan = load_plan(conversion.bound, conversion.layout, rank)
                loads = loads_by_name(plan, conversion.states[rank])
                read = functools.partial(read_chunk, conversion.source, loads, conversion.dtypes)
            spans[file.name] = write_file(partial.directory, file, read, advance)
            partial.note(file.name, spans[file.name])


def _bound(config: HFConfig, *, has_value_head: bool = False) -> list[BoundRow]:
    # The dtype argument has no effect here: conversions keep the dtype of every tensor.
    return bind(model_rows(config, has_value_head=has_value_head), config, torch.bfloat16)


def rank_states(
    config: dict[str, object], layout: TrainLayout, *, naming: Naming = "default", has_value_head: bool = False
) -> list[ShardedRankState]:
    """Return the chunks and objects that each rank of `layout` saves; see mcore_rl.megatron.model.sharded.rank_state.

    Raises: ConversionError.
    """
    with megatron_errors():
        from mcore_rl.megatron.model.sharded import rank_state

        return [
            rank_state(config, layout, rank, naming=naming, has_value_head=has_value_head)
            for rank in range(layout.world_size)
        ]


def open_saved(ckpt: Path) -> McoreCheckpoint:
    """Open a checkpoint with the configuration that it contains, and require that its tensors are exactly this model.

    Raises: ConversionError, also for a critic or a reward model, which have no output projection.
    """
    own = side_files_in(ckpt)
    if not (own / "config.json").exists():
        read_metadata(ckpt)  # a directory that is not a checkpoint gets the error of read_metadata
        raise ConversionError(f"{own / 'config.json'} does not exist: this checkpoint does not name its model")
    checkpoint = open_checkpoint(ckpt, read_hf_config(own))
    if checkpoint.has_value_head:
        raise ConversionError(f"{ckpt} is a critic or a reward model: it computes one value for each token")
    checkpoint.require_complete()
    return checkpoint


def to_hf(
    ckpt: Path, out: Path, *, hf: Path | None = None, fp8: bool = False, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Convert a distributed checkpoint of any layout to an HF directory `out`, with one tensor in memory at a time.

    Tensors keep their dtype. Optimizer state in the checkpoint is ignored. A critic or a reward model becomes
    transformers' sequence classification with one label.

    hf: directory with config.json and the tokenizer files; None: the copy inside the checkpoint.
    fp8: write weights of linear layers as FP8 codes and scales.

    Raises: ConversionError; `out` then does not exist.
    """
    own = side_files_in(ckpt)
    if hf is None and not (own / "config.json").exists():
        read_metadata(ckpt)  # a directory that is not a checkpoint gets the error of read_metadata
        raise ConversionError(
            f"{own / 'config.json'} does not exist: this checkpoint does not name its model; give the HF directory "
            "with --hf"
        )
    described = hf or own
    config = read_hf_config(described)
    _check_config("--ckpt" if hf is None else "--hf", described, config)
    side_files(described)
    checkpoint = open_checkpoint(ckpt, config)
    checkpoint.require_complete()
    record = read_record(ckpt)
    # Trust the record only for tensors that are copies: a damaged record cannot remove a weight.
    sources = [plan for plan in checkpoint.plans if plan.hf_name not in record.absent & checkpoint.repeated]
    scales = {name: stored.dtype for name, stored in record.scales.items()}
    bound = _bound(checkpoint.config, has_value_head=checkpoint.has_value_head)
    export = Fp8Export(checkpoint.config, bound, scales, record.scales_of)
    plans = export.plans(sources) if fp8 else sources
    by_name = {plan.hf_name: plan for plan in plans}
    with HFWriter(out, max_shard_bytes) as writer, byte_progress("to-hf", sum(map(plan_bytes, sources))) as advance:
        writer.begin(plans)
        for source in sources:
            _export(writer, by_name, source.hf_name, checkpoint, export)
            advance(plan_bytes(source))
        config = checkpoint.config
        writer.finish(described, classifier_config(config) if checkpoint.has_value_head else config)


def _export(
    writer: HFWriter, plans: Mapping[str, TensorPlan], name: str, checkpoint: McoreCheckpoint, export: Fp8Export
) -> None:
    # A separate function, so that its local variables do not keep this tensor alive while the next one is read.
    for plan, piece, tensor in export.encoded(plans, name, checkpoint.read(name)):
        writer.write(plan, piece, tensor)


def open_checkpoint(ckpt: Path, config: dict[str, object]) -> McoreCheckpoint:
    """Open a checkpoint with the key scheme (`Naming`) that matches most of its keys.

    Multi-token prediction is dropped from `config` if the checkpoint has none of its tensors: trainers may not keep it.
    An output layer with one row is a value head.

    Raises: ConversionError.
    """
    reader = DcpReader(ckpt, read_metadata(ckpt))
    has_value_head = reader.shapes.get(VALUE_HEAD, (0,))[0] == 1
    if has_value_head:
        config = value_model_config(config)
    elif not any(key.startswith("mtp.") for key in reader.shapes):
        config = without_mtp(config)
    # The keys of layers and experts depend on the settings of the trainer that saved the checkpoint. Try all schemes
    # and keep the one with the fewest missing keys, which McoreCheckpoint then reports.
    best: tuple[int, Sequence[CheckpointChunk]] | None = None
    for naming in get_args(Naming):
        (state,) = rank_states(config, TrainLayout(1), naming=naming, has_value_head=has_value_head)
        absent = sum(chunk.key not in reader.shapes for chunk in state.chunks)
        if best is None or absent < best[0]:
            best = absent, state.chunks
        if absent == 0:
            break
    assert best is not None
    bound = _bound(config, has_value_head=has_value_head)
    return McoreCheckpoint(config, bound, best[1], reader, has_value_head=has_value_head)


def verify(
    hf: Path,
    ckpt: Path,
    *,
    lora: Path | None = None,
    drop_mtp: bool = False,
    mtp_copies: Copies = "equal",
    logits: bool = False,
) -> Certificate:
    """Compare every tensor of an HF directory, merged with the adapter `lora`, with a distributed checkpoint.

    Also compares the computations that the two config.json files describe. `logits` additionally runs both models, each
    with its own config.json, if no tensor is missing. Tensors that a conversion with `drop_mtp` and `mtp_copies` drops
    are not compared.

    Raises: ConversionError if either side is not a model.
    """
    if lora is not None and logits:
        raise ConversionError("--logits runs the HF model without the adapter; remove --logits or --lora")
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
