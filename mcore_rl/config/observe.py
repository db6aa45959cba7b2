"""Section `observe` of the configuration: outputs of a run for people."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.fields import setting


@dataclass
class ObserveConfig:
    report_every_steps: int = setting(50, minimum=0)
    """Interval at which report.html is written during training, by a process of its own. It is also written at the end
    of the run. 0: only at the end."""
