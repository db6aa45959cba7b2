"""Users' policy losses for tests."""

from __future__ import annotations

from pathlib import Path

TEXT_LOSS = """
from mcore_rl.algorithms import Needs

def likelihood(logp, old_logp, advantages, mask, rollout_logp):
    return -logp

likelihood.needs = Needs()
"""


def write_text_loss(directory: Path) -> str:
    """Write a loss without advantages, which trains on texts. Returns its name for algorithm.policy_loss.name."""
    path = directory / "text_loss.py"
    path.write_text(TEXT_LOSS)
    return f"{path}:likelihood"
