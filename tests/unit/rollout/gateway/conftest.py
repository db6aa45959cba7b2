"""Sessions of the gateway on the episodes' scripted engine."""

from __future__ import annotations

from tests.unit.rollout.episodes.conftest import stage

__all__ = ["stage"]
