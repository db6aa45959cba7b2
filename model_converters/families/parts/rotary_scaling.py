"""Rope types that change the frequencies of rotary position embedding. Source: transformers modeling_rope_utils (5.19).

Pair i of d rotated elements turns by position / base ** (2 i / d) radians. A scaling gets these powers of the base and
returns the radians per position; the operations have the order of transformers, so that both have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from model_converters.errors import ConversionError
from model_converters.families.parts.hf_config import HFConfig, integer, number
from model_converters.inputs import is_number


@dataclass(frozen=True)
class Linear:
    """Positions divided by `factor`."""

    factor: float

    def frequencies(self, powers: torch.Tensor, base: float) -> torch.Tensor:
        """Return the radians per position of each pair. Shapes: powers [d / 2] -> [d / 2]."""
        return 1.0 / powers / self.factor


@dataclass(frozen=True)
class Llama3:
    """Scaling of Llama 3.1: pairs with more than `high` turns over the original length keep their frequency, pairs with
    fewer than `low` turns are divided by `factor`, and those in between are interpolated."""

    factor: float
    low: float
    high: float
    original_tokens: int

    def frequencies(self, powers: torch.Tensor, base: float) -> torch.Tensor:
        """Return the radians per position of each pair. Shapes: powers [d / 2] -> [d / 2]."""
        unscaled = 1.0 / powers
        turns = self.original_tokens / (2 * math.pi / unscaled)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - kept) * unscaled / self.factor + kept * unscaled


@dataclass(frozen=True)
class Yarn:
    """YaRN: pairs with more than `beta_fast` turns over the original length keep their frequency, pairs with fewer than
    `beta_slow` turns are divided by `factor`, and a linear ramp over the pairs connects them.

    truncate: whether the bounds of the ramp are rounded to whole pairs.
    mscale, mscale_all_dim: fields of config.json; 0: absent.
    """

    factor: float
    original_tokens: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def frequencies(self, powers: torch.Tensor, base: float) -> torch.Tensor:
        """Return the radians per position of each pair. Shapes: powers [d / 2] -> [d / 2]."""
        pairs = len(powers)

        def pair_with(turns: float) -> float:
            return 2 * pairs * math.log(self.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = pair_with(self.beta_fast), pair_with(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        # transformers widens an empty ramp by the same amount.
        width = last - first or (last + 0.001) - first
        kept = 1 - ((torch.arange(pairs, dtype=torch.float32, device="cpu") - first) / width).clamp(0, 1)
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept

    @property
    def magnitude(self) -> float:
        """Factor on cosines and sines, unless attention_factor replaces it. A single mscale has no effect."""
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class LongRope:
    """Frequency of each pair divided by its own number: short_factor of config.json. Sequences longer than the original
    length would need long_factor instead."""

    divisors: tuple[float, ...]

    def frequencies(self, powers: torch.Tensor, base: float) -> torch.Tensor:
        """Return the radians per position of each pair. Shapes: powers [d / 2] -> [d / 2]."""
        return 1.0 / (torch.tensor(self.divisors, dtype=torch.float32, device="cpu") * powers)


Scaling: TypeAlias = Linear | Llama3 | Yarn | LongRope


class RopeFields(NamedTuple):
    """Rotation settings of config.json: the object `found`, its name, and what the rope types read beside it."""

    name: str
    found: HFConfig
    rotated: int
    max_positions: int


class ReadScaling(NamedTuple):
    """Scaling of a rope type, factor on cosines and sines, and the longest sequence, in tokens, for which both are
    exact (None: any)."""

    scaling: Scaling | None = None
    factor: float = 1.0
    max_tokens: int | None = None


def _default(rope: RopeFields) -> ReadScaling:
    return ReadScaling()


def _linear(rope: RopeFields) -> ReadScaling:
    return ReadScaling(Linear(scale_factor(rope, "factor")))


def _dynamic(rope: RopeFields) -> ReadScaling:
    """Read the NTK scaling. Up to max_position_embeddings it has no effect; beyond it, the frequencies of a sequence
    would change with its length."""
    scale_factor(rope, "factor")
    return ReadScaling(max_tokens=rope.max_positions)


def _llama3(rope: RopeFields) -> ReadScaling:
    factor, original = scale_factor(rope, "factor"), _original_tokens(rope)
    low, high = (number(rope.found, f"{end}_freq_factor", inside=rope.name, positive=True) for end in ("low", "high"))
    if high <= low:
        raise ConversionError(
            f"config.json: {rope.name}.high_freq_factor is {high}; it must be above low_freq_factor {low}"
        )
    return ReadScaling(Llama3(factor, low, high, original))


def _yarn(rope: RopeFields) -> ReadScaling:
    truncate = rope.found.get("truncate", True)
    # null differs from the default: transformers then does not round the bounds of the ramp.
    if truncate is not None and not isinstance(truncate, bool):
        raise ConversionError(f"config.json: {rope.name}.truncate is {truncate!r}; it must be true or false")
    if number(rope.found, "rope_theta", inside=rope.name, positive=True) == 1:
        raise ConversionError(f"config.json: {rope.name}.rope_theta is 1, with which yarn has no frequencies")
    if rope.rotated % 2:
        raise ConversionError(
            f"config.json: {rope.name}.partial_rotary_factor: yarn rotates pairs, but {rope.rotated} elements are odd"
        )
    scaling = Yarn(
        scale_factor(rope, "factor"),
        _original_tokens(rope),
        _optional(rope, "beta_fast") or 32.0,
        _optional(rope, "beta_slow") or 1.0,
        bool(truncate),
        _optional(rope, "mscale"),
        _optional(rope, "mscale_all_dim"),
    )
    return ReadScaling(scaling, _attention_factor(rope) or scaling.magnitude)


def _long_rope(rope: RopeFields) -> ReadScaling:
    original = _original_tokens(rope, minimum=2)
    short, _ = (_divisors(rope, f"{kind}_factor") for kind in ("short", "long"))
    factor = rope.max_positions / original
    if rope.found.get("factor") is not None:
        factor = number(rope.found, "factor", inside=rope.name, positive=True)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return ReadScaling(LongRope(short), _attention_factor(rope) or magnitude, original)


READERS: Mapping[str, Callable[[RopeFields], ReadScaling]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _long_rope,
}
"""Rope type -> reader of its fields. Each raises ConversionError naming the field."""


def scale_factor(rope: RopeFields, key: str) -> float:
    """Read a required number of at least 1.

    Raises: ConversionError.
    """
    factor = 0.0 if rope.found.get(key) is None else number(rope.found, key, inside=rope.name)
    if factor < 1:
        kind, value = rope.found["rope_type"], rope.found.get(key)
        raise ConversionError(f"config.json: rope scaling {kind!r} has {key} {value!r}; it must be at least 1")
    return factor


def _original_tokens(rope: RopeFields, minimum: int = 1) -> int:
    scale_factor(rope, "original_max_position_embeddings")
    return integer(rope.found, "original_max_position_embeddings", minimum=minimum)


def _optional(rope: RopeFields, key: str) -> float:
    """Read an optional number. null and 0 mean absent, as in transformers."""
    return 0.0 if rope.found.get(key) is None else number(rope.found, key, inside=rope.name)


def _attention_factor(rope: RopeFields) -> float | None:
    if rope.found.get("attention_factor") is None:
        return None
    return number(rope.found, "attention_factor", inside=rope.name, positive=True)


def _divisors(rope: RopeFields, key: str) -> tuple[float, ...]:
    value, pairs = rope.found.get(key), -(-rope.rotated // 2)
    if not isinstance(value, list | tuple) or len(value) != pairs or not all(is_number(v) and v > 0 for v in value):
        raise ConversionError(f"config.json: {rope.name}.{key} must be a list of {pairs} numbers above 0")
    return tuple(map(float, value))
