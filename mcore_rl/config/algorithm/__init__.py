"""Section `algorithm` of the configuration: advantages, losses, corrections, selection of groups."""

from mcore_rl.config.algorithm.corrections import CorrectionConfig, ListedCorrectionConfig
from mcore_rl.config.algorithm.policy_loss import (
    POLICY_LOSSES,
    PREFERENCE,
    SAMPLED_LOSSES,
    SCORES,
    SUPERVISED,
    PolicyLossConfig,
)
from mcore_rl.config.algorithm.section import (
    KL_KINDS,
    LOSS_AGGREGATIONS,
    AlgorithmConfig,
    DriftPenaltyConfig,
    DynamicSamplingConfig,
    EntropyControlConfig,
    KLConfig,
    is_supervised,
)
from mcore_rl.config.algorithm.sources import (
    ADVANTAGES,
    COMPARING_ADVANTAGES,
    GROUP_ADVANTAGES,
    STD_LEVELS,
    SourceConfig,
    SourceLossConfig,
)

__all__ = [
    "ADVANTAGES",
    "COMPARING_ADVANTAGES",
    "GROUP_ADVANTAGES",
    "KL_KINDS",
    "LOSS_AGGREGATIONS",
    "POLICY_LOSSES",
    "PREFERENCE",
    "SAMPLED_LOSSES",
    "SCORES",
    "STD_LEVELS",
    "SUPERVISED",
    "AlgorithmConfig",
    "CorrectionConfig",
    "DriftPenaltyConfig",
    "DynamicSamplingConfig",
    "EntropyControlConfig",
    "KLConfig",
    "ListedCorrectionConfig",
    "PolicyLossConfig",
    "SourceConfig",
    "SourceLossConfig",
    "is_supervised",
]
