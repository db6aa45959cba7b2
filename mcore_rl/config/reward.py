"""Sections of the rewards: those of rules, and those of a language model that judges."""

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
    """math (reads \\boxed{}, an `Answer:` line, `####`, or the last formula or number),
    `module_or_file.py:function` with verl's signature, or none: reward models alone."""
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
    max_error_fraction: float = 1.0
    """A step or a validation ends the run if so many of its responses could not be graded: the function raised, took
    too long, died, or returned no number. 0: any."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)


@dataclass
class JudgeConfig:
    """A frozen language model that reads every response and writes a score, on inference engines of its own."""

    hf_path: str | None = None
    """HF directory, of a supported family; null: no judge."""
    tokenizer_path: str | None = None
    """Directory or tokenizer.json file; null: judge.hf_path."""
    dtype: str | None = None
    """float32 or bfloat16; null: model.dtype."""
    weight: float = 1.0
    """Of the judge's score in the reward."""
    template: str | None = None
    """What the judge is asked, or a .txt file with it; {prompt}, {response} and {ground_truth} are replaced. Where its
    tokenizer has a chat template, this is a user's message."""
    score_pattern: str = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the number; its last match in the judge's answer is the score."""
    parser: str | None = None
    """`module_or_file.py:function` that finds the score instead, called as f(answer, finish_reason, data_source,
    ground_truth, extra_info) in the judge's process; it returns a number, or None where it finds none."""
    min_score: float | None = None
    max_score: float | None = None
    """A score beyond these bounds counts as none."""
    unparsable: float = 0.0
    """Score of an answer without one, and of a response too long for judge.max_prompt_tokens."""
    samples: int = 1
    """Answers to every response; the score is their mean."""
    num_engines: int = 1
    tp: int = 1
    """Tensor-parallel ranks of one engine."""
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    max_prompt_tokens: int = 4096
    """Of the rendered question, prompt and response included."""
    max_response_tokens: int = 512
    """An answer that reaches it is read as far as it goes, but a score at its very end, which may lack digits, counts
    as none."""
    max_concurrent_requests: int = 256
    kv_cache_gib: float = 0.25
    """As in rollout, for judges."""
    gpu_memory_fraction: float = 0.6
    enforce_eager: bool = True
