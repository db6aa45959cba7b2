"""Section `observe` of the configuration: outputs of a run for people."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.fields import setting

TOKEN_VALUES = "tokens"
"""Folder of run.dir with the per-token values of a few responses, one file step_<n>.jsonl per step."""


@dataclass
class ObserveConfig:
    report_every_steps: int = setting(50, minimum=0)
    """Interval at which report.html is written during training, by a process of its own. It is also written at the end
    of the run. 0: only at the end."""
    token_responses: int = setting(8, minimum=0, unit="responses")
    """Responses per step whose log-probabilities of engine and trainer are recorded token by token, for the report. One
    trainer rank writes them. 0: none."""
