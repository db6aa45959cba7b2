"""Bit-for-bit comparison of an HF directory and a Megatron checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from model_converters.dcp.model import McoreCheckpoint
from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.families.parts.arguments import ModelArguments
from model_converters.families.parts.hf_config import HFConfig
from model_converters.families.parts.mtp import without_mtp
from model_converters.hf.fp8_export import has_powers, is_quantised_from
from model_converters.hf.io import HFCheckpoint
from model_converters.hf.shards import as_bytes
from model_converters.progress import byte_progress

# Tolerance relative to the largest logit, for two float32 implementations of a model. A wrong weight or setting changes
# logits by far more.
_LOGIT_TOLERANCE = 1e-3
_ABSENT = object()


@dataclass(frozen=True)
class LogitDifference:
    """Largest absolute difference of two models' logits, and the largest absolute logit."""

    max_abs_diff: float
    max_abs_logit: float

    @property
    def problem(self) -> str | None:
        if self.max_abs_diff <= _LOGIT_TOLERANCE * max(self.max_abs_logit, 1.0):  # False for NaN
            return None
        return f"differ by up to {self.max_abs_diff:.3g}; the largest logit is {self.max_abs_logit:.3g}"


@dataclass(frozen=True)
class Certificate:
    """Result of a comparison.

    checksums: HF name -> BLAKE2b of the checkpoint's bytes, for every tensor that is equal on both sides.
    mismatched: name -> difference; an HF name, or a checkpoint key for tensors without a row.
    missing: names of `mismatched` that one side lacks or that cannot be read. Logits are compared only if it is empty.
    quantised: names of `checksums` that are equal only after FP8 rounding: quantising the checkpoint's values gives the
    FP8 codes and scales of the HF directory, bit for bit.
    config: field of config.json that changes the computation -> difference.
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
        """BLAKE2b of all names and checksums in alphabetical order."""
        lines = "".join(f"{name} {self.checksums[name]}\n" for name in sorted(self.checksums))
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()

    def as_json(self) -> dict[str, object]:
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
        """Yield one line per difference, then the summary."""
        width = max(map(len, self.mismatched), default=0)
        for name in sorted(self.mismatched):
            yield f"{name:{width}}  {self.mismatched[name]}"
        for name, difference in self.config.items():
            yield f"config.json: {name} {difference}"
        total, same = len(self.checksums) + len(self.mismatched), len(self.checksums)
        rounded = f" ({len(self.quantised)} of them after FP8 rounding)" if self.quantised else ""
        yield f"{same} of {total} tensors are equal bit for bit{rounded}; BLAKE2b of all: {self.checksum}"
        if self.logits is not None:
            agreement = f"agree: the largest difference is {self.logits.max_abs_diff:.3g}"
            yield f"logits {self.logits.problem or agreement}"


def config_differences(hf: HFConfig, own: HFConfig) -> dict[str, str]:
    """Compare the config.json files of an HF directory (`hf`) and a checkpoint (`own`). Returns field -> difference.

    The result is empty if both files describe the same computation, even with different fields. It contains the fields
    that change the computation on their own, or all differing fields if none does. Multi-token prediction is not
    compared, because a checkpoint may lack it.
    """
    source, stored = without_mtp(hf), without_mtp(own)
    stored_arguments = _model_arguments(stored)
    if _model_arguments(source) == stored_arguments:
        return {}
    differing = [key for key in sorted({*source, *stored}) if source.get(key, _ABSENT) != stored.get(key, _ABSENT)]
    decisive = [key for key in differing if _model_arguments(_exchanged(stored, key, source)) != stored_arguments]
    return {
        key: f"is {_value(source, key)} in the HF directory, {_value(stored, key)} in the checkpoint"
        for key in decisive or differing
    }


def _model_arguments(config: HFConfig) -> ModelArguments | None:
    try:
        return family_for(config).model_arguments(config)
    except ConversionError:
        return None


def _exchanged(config: HFConfig, key: str, other: HFConfig) -> dict[str, object]:
    rest = {name: value for name, value in config.items() if name != key}
    return {**rest, key: other[key]} if key in other else rest


def _value(config: HFConfig, key: str) -> str:
    return json.dumps(config[key]) if key in config else "absent"


def compare(source: HFCheckpoint, checkpoint: McoreCheckpoint, dropped: Collection[str] = ()) -> Certificate:
    """Compare both sides tensor by tensor, except the HF tensors in `dropped`.

    Raises: ConversionError if the HF directory cannot be read.
    """
    mismatched = dict.fromkeys(checkpoint.unknown, "is in the checkpoint but has no row in the weight table")
    mismatched |= {name: f"cannot be read: {problem}" for name, problem in checkpoint.problems.items()}
    wanted = [name for name in source.shapes if name not in checkpoint.problems and name not in dropped]
    stored_names = {name: checkpoint.redundant.get(name, name) for name in wanted}
    mismatched |= {
        name: "is only in the HF directory" for name in wanted if stored_names[name] not in checkpoint.shapes
    }
    # `repeated` tensors are copies that an HF directory may omit: their absence is not a difference.
    mismatched |= {
        name: "is only in the checkpoint"
        for name in checkpoint.shapes
        if name not in source.shapes and name not in checkpoint.repeated
    }
    # All differences found so far are absent or unreadable tensors: one of the two models cannot be run.
    missing = frozenset(mismatched)
    checksums, quantised = {}, set()
    common = sorted((name for name in wanted if stored_names[name] in checkpoint.shapes), key=source.position)
    sizes = {name: source.dtype(name).itemsize * torch.Size(source.shapes[name]).numel() for name in common}
    with ThreadPoolExecutor(2) as pool, byte_progress("verify", sum(sizes.values())) as advance:
        # In the order of the HF files, which are then read sequentially.
        for name in common:
            try:
                checksums[name], rounded = _same(source, checkpoint, name, stored_names[name], pool)
                quantised |= {name} if rounded else set()
            except _DifferenceError as difference:
                mismatched[name] = str(difference)
            advance(sizes[name])
    return Certificate(
        checksums, mismatched, missing, frozenset(quantised), config_differences(source.config, checkpoint.config)
    )


class _DifferenceError(Exception):
    """A tensor differs between the two sides."""


def _same(
    source: HFCheckpoint, checkpoint: McoreCheckpoint, name: str, stored_name: str, pool: ThreadPoolExecutor
) -> tuple[str, bool]:
    """Compare one tensor. Returns its checksum, and whether the sides are equal only after FP8 rounding."""
    source_shape, stored_shape = source.shapes[name], checkpoint.shapes[stored_name]
    if source_shape != stored_shape:
        raise _DifferenceError(f"is {source_shape} in the HF directory, {stored_shape} in the checkpoint")
    if source.dtype(name) != checkpoint.dtype(stored_name):
        raise _DifferenceError(
            f"is {source.dtype(name)} in the HF directory, {checkpoint.dtype(stored_name)} in the checkpoint"
        )
    wanted = source.read(name)
    try:
        stored = checkpoint.read(stored_name)
    except ConversionError as error:
        raise _DifferenceError(f"cannot be read: {error}") from error
    # hashlib releases the GIL: the two sides are hashed in parallel.
    first, second = pool.map(_checksum, ([wanted], [stored]))
    if first == second:
        return first, False
    # The bytes of an FP8 source cannot equal the checkpoint's: compare its codes with the quantised checkpoint values.
    powers = has_powers(source.config)
    if source.block is not None and is_quantised_from(stored, *source.stored(name), source.block, power_of_two=powers):
        return second, True
    # Count elements by their bits: NaN != NaN and 0.0 == -0.0 would give wrong counts.
    different = int((_bits(wanted) != _bits(stored)).any(1).sum())
    raise _DifferenceError(f"differs in {different} of {wanted.numel()} elements: {first} and {second}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes. Shapes: -> [elements, itemsize]."""
    return tensor.contiguous().view(-1).view(torch.uint8).view(-1, tensor.itemsize)


def _checksum(holder: list[torch.Tensor]) -> str:
    """Pop the only tensor of `holder` and return its checksum.

    A pool thread keeps references to its arguments after it has returned the result. The list is emptied so that the
    tensor is freed before the next one is read.
    """
    tensor = holder.pop()
    return hashlib.blake2b(as_bytes(tensor.contiguous()), digest_size=16).hexdigest()
