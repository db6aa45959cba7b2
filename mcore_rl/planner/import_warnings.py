"""Warnings of Megatron when it is imported."""

from __future__ import annotations

import warnings


def suppress_megatron_warnings() -> None:
    """Suppress Megatron's import warnings about missing packages: a plan runs nothing, and `mcore-rl doctor` lists
    them. Call it before other modules of the planner are imported."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
