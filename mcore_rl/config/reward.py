"""Section of the rewards."""

from __future__ import annotations

from dataclasses import dataclass, field

NO_RULE = "none"
"""Value of reward.function where reward models alone give rewards."""


@dataclass
class OverlongConfig:
    """DAPO's soft overlong punishment: 0 up to max_response_tokens - buffer_tokens, then linearly to -penalty."""

    enable: bool = False
    buffer_tokens: int = 128
    penalty: float = 1.0


@dataclass
class RewardConfig:
    function: str = "math"
    """math, `module_or_file.py:function` with verl's signature, or none: reward models alone."""
    weight: float = 1.0
    """Of the function's reward in the sum with those of reward models."""
    kwargs: dict[str, str] = field(default_factory=dict)
    """Extra keyword arguments of a user's function."""
    correct: float = 1.0
    incorrect: float = 0.0
    """Rewards of the built-in grader (DAPO's paper: 1 and -1)."""
    timeout_seconds: float = 10.0
    workers: int = 1
    """Grading processes beside each engine."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
