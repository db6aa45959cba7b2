"""Parts of an entry of the guide: metric, warning, remedies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mcore_rl.config.schema import Config
from mcore_rl.observe.guide.conditions import Condition


def _always(config: Config) -> bool:
    return True


@dataclass(frozen=True)
class Remedy:
    """Change that may help.

    text: imperative clause with the full names of keys.
    applies: function of the configuration; False if the change is already made or has no effect.
    when: the same condition in words, for docs/metrics.md; "": always.
    """

    text: str
    applies: Callable[[Config], bool] = _always
    when: str = ""


@dataclass(frozen=True)
class Warned:
    """Warning, once per run, at the first step after `after_step` at which `condition` holds.

    text: template with the fields {now} (current value), {first} (first value), {times} (current value divided by the
    median of the last values), {reward} (mean reward), {graders} (names of the graders) and {remedies}.
    """

    condition: Condition
    text: str
    after_step: int = 0


@dataclass(frozen=True)
class Counted:
    """Row of the report's table of warnings if the sum over all steps is not 0. `text` follows the sum."""

    text: str


@dataclass(frozen=True)
class MetricEntry:
    """Meaning of one metric.

    healthy: healthy range.
    alert: warning of the log and the report; None: neither warns.
    signs: further signs of a problem, for which there is no threshold.
    remedies: possible actions, the most probable one first.
    """

    name: str
    healthy: str
    remedies: tuple[Remedy, ...]
    alert: Warned | Counted | None = None
    signs: str = ""
