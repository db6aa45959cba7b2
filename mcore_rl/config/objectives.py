"""Objectives of a run: reinforcement learning, and training on texts of the data set without engines."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.fields import setting

RL, SFT, DPO, REWARD_MODEL = "rl", "sft", "dpo", "reward_model"
OBJECTIVES = (RL, SFT, DPO, REWARD_MODEL)
"""Values of trainer.objective. Every value besides rl is also the name of its loss in algorithm.policy_loss.name."""
PAIRED = (DPO, REWARD_MODEL)
"""Objectives that train on pairs of a chosen and a rejected response."""
SIGMOID, IPO, HINGE, ROBUST = "sigmoid", "ipo", "hinge", "robust"
PREFERENCE_LOSSES = (SIGMOID, IPO, HINGE, ROBUST)


@dataclass
class ObjectiveConfig:
    """The objective of a run; a part of TrainerConfig."""

    objective: str = setting(RL, choices=OBJECTIVES)
    """Objective of the run. rl: reinforcement learning on generated responses, or a warm start with
    algorithm.policy_loss.name=sft. sft: supervised training on conversations (docs/supervised.md). dpo: direct
    preference optimization on pairs of a chosen and a rejected response (docs/preference.md). reward_model: training of
    a model that scores responses, on such pairs (docs/reward-model-training.md). Only rl starts engines."""


@dataclass
class PreferenceConfig:
    """Training on pairs: direct preference optimization (trainer.objective=dpo) and reward models
    (trainer.objective=reward_model). The margin of a pair is the difference between the rewards of its chosen and its
    rejected response; docs/preference.md has the formulas."""

    loss: str = setting(SIGMOID, choices=PREFERENCE_LOSSES)
    """Loss of the margin, for dpo. sigmoid: DPO. ipo: squared distance of margin / beta from 1 / (2 beta). hinge: SLiC.
    robust: DPO, corrected for the fraction label_smoothing of swapped labels."""
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
    """Assumed fraction of pairs whose labels are swapped, for loss sigmoid (conservative DPO) and robust."""
    sft_weight: float = setting(0.0, minimum=0)
    """Weight of the cross-entropy of the chosen response, per token, which dpo adds to the loss; 0: none."""
    center_rewards_coefficient: float = setting(0.0, minimum=0)
    """Coefficient of the squared sum of both rewards, which reward_model adds to the loss, so that rewards are 0 on
    average; 0: none."""
