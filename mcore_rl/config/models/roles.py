"""Sections of the other models on Megatron ranks, except teachers: critic, reward model and reference."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.fields import setting
from mcore_rl.config.models.actor import ActorConfig
from mcore_rl.config.models.optimizer import OptimizerSettings


@dataclass
class CriticConfig(ActorConfig):
    """Value model for estimators that need one. It has the actor's keys for its own model and layout, except for
    log-probabilities, multi-token prediction and replay."""

    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-5))
    hf_path: str | None = setting(None, path=True, hub="model")
    """Hugging Face directory of a causal model (the value head starts random), or of a token or sequence classification
    model with one label; null: model.hf_path."""
    clip_range: float | None = setting(0.2, above=0)
    """Clip range of the value loss: a value that moved further from its old value gets no gradient; null: no
    clipping."""
    update_epochs: int = setting(1, minimum=1)
    """Critic passes over a step's updates per policy pass (trainer.update_epochs). Values may need more passes than a
    policy tolerates."""


@dataclass
class RewardModelConfig(ActorConfig):
    """Frozen model that scores responses. Of the actor's keys, it uses its own layout, tokens_per_microbatch,
    moe.dispatcher, fp8, and offload.params, which keeps its weights in host memory except during its pass."""

    hf_path: str | None = setting(None, path=True, hub="model")
    """Hugging Face directory of a sequence classification model with one label; null: no reward model."""
    weight: float = 1.0
    """Weight of its score in the reward."""


@dataclass
class ReferenceConfig:
    """Frozen policy for algorithm.kl, on the actor's ranks and in its layout."""

    hf_path: str | None = setting(None, path=True, hub="model")
    """Hugging Face directory of a model with the actor's architecture; null: the policy's initial weights."""
    offload: bool = True
    """Keep its weights in host memory except during its forward pass."""
    refresh_every_steps: int = setting(0, minimum=0)
    """Interval at which the policy's current weights are copied to the reference; 0: never."""
