"""Objectives of a run: reinforcement learning, and training on texts of the data set without engines."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.fields import setting

RL, SFT, DPO = "rl", "sft", "dpo"
OBJECTIVES = (RL, SFT, DPO)
"""Values of trainer.objective. Every value besides rl is also the name of its loss in algorithm.policy_loss.name."""


@dataclass
class ObjectiveConfig:
    """The objective of a run; a part of TrainerConfig."""

    objective: str = setting(RL, choices=OBJECTIVES)
    """Objective of the run. rl: reinforcement learning on generated responses, or a warm start with
    algorithm.policy_loss.name=sft. sft: supervised training on conversations (docs/supervised.md). dpo: direct
    preference optimization on pairs of a chosen and a rejected response (docs/preference.md). sft and dpo start no
    engines."""


@dataclass
class PreferenceConfig:
    """Direct preference optimization on pairs (trainer.objective=dpo). The margin of a pair is the difference between
    the rewards of its chosen and its rejected response; docs/preference.md has the formulas."""

    beta: float = setting(0.1, above=0)
    """Factor of the rewards: a response's reward is beta times the sum of log policy - log reference over its
    tokens."""
    length_normalized: bool = False
    """Divide the sum of each response by its number of trained tokens."""
    reference_free: bool = False
    """Compute rewards without a reference, from the log-probabilities of the policy only. With length_normalized and a
    target_margin this is SimPO."""
    target_margin: float = setting(0.0, minimum=0)
    """Number that the loss subtracts from the margin of each pair; 0: none."""
    label_smoothing: float = setting(0.0, minimum=0, below=0.5)
    """Assumed fraction of pairs whose labels are swapped (conservative DPO)."""
