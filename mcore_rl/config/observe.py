"""Section `observe` of the configuration: outputs of a run for people."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.fields import setting

TOKEN_VALUES = "tokens"
"""Folder of run.dir with the per-token values of a few responses, one file step_<n>.jsonl per step."""


@dataclass
class ProfileConfig:
    """Profiles of trainer ranks by torch.profiler, in the folder profile of run.dir."""

    steps: list[int] = setting([], minimum=1, one_or_more=True)
    """Steps that are profiled, from their beginning to the end of the weight sync. A profiled step is slower. []: none;
    no profiler is loaded."""
    ranks: list[int] = setting([0], minimum=0, one_or_more=True)
    """Trainer ranks that record a profile."""


@dataclass
class ObserveConfig:
    report_every_steps: int = setting(50, minimum=0)
    """Interval at which report.html is written during training, by a process of its own. It is also written at the end
    of the run. 0: only at the end."""
    token_responses: int = setting(8, minimum=0, unit="responses")
    """Responses per step whose log-probabilities of engine and trainer are recorded token by token, for the report. One
    trainer rank writes them. 0: none."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
