"""The certificate that an HF directory and a megatron checkpoint hold the same model, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from model_converters.dcp.model import McoreCheckpoint
from model_converters.errors import ConversionError
from model_converters.families import ModelArguments, family_for
from model_converters.families.parts.hf_config import HFConfig
from model_converters.families.parts.mtp import without_mtp
from model_converters.hf.fp8_export import is_quantised_from
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.shards import as_bytes
from model_converters.progress import ByteProgress

# Of two float32 implementations of one model; a wrong weight or setting moves logits by far more.
_LOGIT_TOLERANCE = 1e-3
_ABSENT = object()


@dataclass(frozen=True)
class LogitDifference:
    """Largest absolute difference of the two models' logits, and largest absolute logit."""

    max_abs_diff: float
    max_abs_logit: float

    @property
    def problem(self) -> str | None:
        if self.max_abs_diff <= _LOGIT_TOLERANCE * max(self.max_abs_logit, 1.0):  # False for NaN
            return None
        return f"differ by {self.max_abs_diff:.3g}; the largest is {self.max_abs_logit:.3g}"


@dataclass(frozen=True)
class Certificate:
    """checksums: HF name -> BLAKE2b of the bytes of every tensor that is the same on both sides; mismatched: name ->
    what differs, an HF name or, for what has no row, the checkpoint's own; missing: those that one side lacks.

    quantised: those of `checksums` (the checkpoint's bytes) of which the HF directory holds the FP8 quantisation: its
    codes and scales are bit for bit what rounding the checkpoint's values gives. config: fields of config.json by which
    the two compute differently -> how they differ.
    """

    checksums: Mapping[str, str]
    mismatched: Mapping[str, str]
    missing: frozenset[str]
    quantised: frozenset[str] = frozenset()
    config: Mapping[str, str] = field(default_factory=dict)
    logits: LogitDifference | None = None

    @property
    def holds(self) -> bool:
        return not self.mismatched and not self.config and (self.logits is None or self.logits.problem is None)

    @property
    def checksum(self) -> str:
        """One for all: of the names and checksums in alphabetical order."""
        lines = "".join(f"{name} {self.checksums[name]}\n" for name in sorted(self.checksums))
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()

    def as_json(self) -> dict[str, Any]:
        return {
            "tensors": len(self.checksums) + len(self.mismatched),
            "mismatched": sorted(self.mismatched),
            "max_abs_logit_diff": self.logits.max_abs_diff if self.logits else None,
            "quantised": len(self.quantised),
            "config": dict(self.config),
            "reasons": dict(self.mismatched),
            "checksum": self.checksum,
            "checksums": dict(self.checksums),
        }

    def as_table(self) -> Iterator[str]:
        """What differs, name by name, then the verdict."""
        width = max(map(len, self.mismatched), default=0)
        for name in sorted(self.mismatched):
            yield f"{name:{width}}  {self.mismatched[name]}"
        for name, difference in self.config.items():
            yield f"config.json: {name} {difference}"
        total, same = len(self.checksums) + len(self.mismatched), len(self.checksums)
        rounded = f" ({len(self.quantised)} of them after FP8 rounding)" if self.quantised else ""
        yield f"{same} of {total} tensors are the same bit for bit{rounded}; BLAKE2b of all: {self.checksum}"
        if self.logits is not None:
            yield f"logits {self.logits.problem or f'agree: they differ by at most {self.logits.max_abs_diff:.3g}'}"


def config_differences(hf: HFConfig, own: HFConfig) -> dict[str, str]:
    """Fields of config.json -> how they differ, of an HF directory and a checkpoint; none where both describe the same
    computation, however they spell it. Of the fields that differ those are named which alone make a difference, or all.
    Multi-token prediction, which a checkpoint may leave out, is not compared."""
    theirs, ours = without_mtp(hf), without_mtp(own)
    described = _described(ours)
    if _described(theirs) == described:
        return {}
    differing = [key for key in sorted({*theirs, *ours}) if theirs.get(key, _ABSENT) != ours.get(key, _ABSENT)]
    decisive = [key for key in differing if _described(_exchanged(ours, key, theirs)) != described]
    return {
        key: f"is {_value(theirs, key)} in the HF directory, {_value(ours, key)} in the checkpoint"
        for key in decisive or differing
    }


def _described(config: HFConfig) -> ModelArguments | None:
    try:
        return family_for(config).model_arguments(config)
    except ConversionError:
        return None


def _exchanged(config: HFConfig, key: str, other: HFConfig) -> dict[str, Any]:
    rest = {name: value for name, value in config.items() if name != key}
    return {**rest, key: other[key]} if key in other else rest


def _value(config: HFConfig, key: str) -> str:
    return json.dumps(config[key]) if key in config else "absent"


def compare(source: HFCheckpoint, checkpoint: McoreCheckpoint, dropped: Collection[str] = ()) -> Certificate:
    """Reads both sides tensor by tensor; `dropped` are tensors of the HF directory that are not compared.

    Raises: ConversionError when the HF directory cannot be read.
    """
    mismatched = dict.fromkeys(checkpoint.unknown, "is in the checkpoint, and has no row in the weight table")
    mismatched |= {name: f"cannot be read: {problem}" for name, problem in checkpoint.problems.items()}
    wanted = [name for name in source.shapes if name not in checkpoint.problems and name not in dropped]
    stored_names = {name: checkpoint.redundant.get(name, name) for name in wanted}
    mismatched |= {
        name: "is only in the HF directory" for name in wanted if stored_names[name] not in checkpoint.shapes
    }
    # A copy that the HF directory lacks is no tensor of the checkpoint's own.
    mismatched |= {
        name: "is only in the checkpoint"
        for name in checkpoint.shapes
        if name not in source.shapes and name not in checkpoint.repeated
    }
    missing = frozenset(mismatched)
    checksums, quantised = {}, set()
    common = sorted((name for name in wanted if stored_names[name] in checkpoint.shapes), key=source.position)
    sizes = {name: source.dtype(name).itemsize * torch.Size(source.shapes[name]).numel() for name in common}
    with ThreadPoolExecutor(2) as pool, ByteProgress("verify", sum(sizes.values())) as progress:
        for name in common:
            try:
                checksums[name], rounded = _same(source, checkpoint, name, stored_names[name], pool)
                quantised |= {name} if rounded else set()
            except _DifferenceError as difference:
                mismatched[name] = str(difference)
            progress.advance(sizes[name])
    return Certificate(
        checksums, mismatched, missing, frozenset(quantised), config_differences(source.config, checkpoint.config)
    )


class _DifferenceError(Exception):
    """One tensor is not the same on both sides."""


def _same(
    source: HFCheckpoint, checkpoint: McoreCheckpoint, name: str, stored_name: str, pool: ThreadPoolExecutor
) -> tuple[str, bool]:
    """The checksum of a tensor on both sides, and whether they are the same only after FP8 rounding."""
    ours, theirs = source.shapes[name], checkpoint.shapes[stored_name]
    if ours != theirs:
        raise _DifferenceError(f"is {ours} in the HF directory, {theirs} in the checkpoint")
    if source.dtype(name) != checkpoint.dtype(stored_name):
        raise _DifferenceError(
            f"is {source.dtype(name)} in the HF directory, {checkpoint.dtype(stored_name)} in the checkpoint"
        )
    wanted = source.read(name)
    try:
        stored = checkpoint.read(stored_name)
    except ConversionError as error:
        raise _DifferenceError(f"cannot be read: {error}") from error
    # hashlib releases the interpreter: the two sides are hashed at once.
    first, second = pool.map(_checksum, ([wanted], [stored]))
    if first == second:
        return first, False
    powers = source.config.get("quantization_config", {}).get("scale_fmt") == "ue8m0" if source.block else False
    if source.block is not None and is_quantised_from(stored, *source.stored(name), source.block, power_of_two=powers):
        return second, True
    different = int((_bits(wanted) != _bits(stored)).any(1).sum())
    raise _DifferenceError(f"differs in {different} of {wanted.numel()} elements: {first} and {second}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Shapes: [elements, bytes of one]."""
    return tensor.contiguous().view(-1).view(torch.uint8).view(-1, tensor.itemsize)


def _checksum(handed_over: list[torch.Tensor]) -> str:
    """Of the one tensor in the list, which is empty afterwards: a pool's thread lets go of its arguments only some time
    after it has handed the result over, and by then the next tensors may have been read."""
    tensor = handed_over.pop()
    return hashlib.blake2b(as_bytes(tensor.contiguous()), digest_size=16).hexdigest()
