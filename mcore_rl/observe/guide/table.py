"""All entries of the guide by section."""

from __future__ import annotations

from mcore_rl.observe.guide.entries import Counted, MetricEntry
from mcore_rl.observe.guide.learning import GROUPS, REWARDS, TEXTS
from mcore_rl.observe.guide.policy import AGREEMENT, POLICY
from mcore_rl.observe.guide.speed import ASYNCHRONOUS, SPEED

GUIDE: dict[str, tuple[MetricEntry, ...]] = {
    "Rewards": REWARDS,
    "Groups and responses": GROUPS,
    "Conversations and pairs": TEXTS,
    "Policy": POLICY,
    "Engine and trainer": AGREEMENT,
    "Asynchronous training": ASYNCHRONOUS,
    "Speed and failures": SPEED,
}
"""Sections of docs/metrics.md, in its order."""

ENTRIES: dict[str, MetricEntry] = {entry.name: entry for section in GUIDE.values() for entry in section}
"""Entries by metric."""

COUNTED: dict[str, Counted] = {name: entry.alert for name, entry in ENTRIES.items() if isinstance(entry.alert, Counted)}
"""Metrics that are 0 in a run without failures."""

GRADIENT = "actor/grad_norm"
"""The only metric with a warning in supervised runs."""
