"""Section `model`, and sections of models on Megatron ranks: layout, optimizer, memory, and the roles that use them."""

from mcore_rl.config.models.actor import FSDP2, ActorConfig, LoraConfig, MoeConfig
from mcore_rl.config.models.layout import OffloadConfig, ParallelConfig
from mcore_rl.config.models.model import ModelConfig
from mcore_rl.config.models.optimizer import LARGEST_SCALE, LossScaleConfig, OptimizerSettings
from mcore_rl.config.models.roles import CriticConfig, ReferenceConfig, RewardModelConfig
from mcore_rl.config.models.teacher import OTHERS, TeacherConfig, TeacherSourceConfig

__all__ = [
    "FSDP2",
    "LARGEST_SCALE",
    "OTHERS",
    "ActorConfig",
    "CriticConfig",
    "LoraConfig",
    "LossScaleConfig",
    "ModelConfig",
    "MoeConfig",
    "OffloadConfig",
    "OptimizerSettings",
    "ParallelConfig",
    "ReferenceConfig",
    "RewardModelConfig",
    "TeacherConfig",
    "TeacherSourceConfig",
]
