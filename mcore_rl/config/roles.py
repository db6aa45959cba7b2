"""The part of the configuration that describes one model of a run, with the names of its keys for error messages.

Policy, critic and reward model are checked and built by the same code from sections of their own, and the engines of
rollout and judge likewise. That code gets a role instead of the whole configuration. Functions that need no section
take `names` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from mcore_rl.config.models import ActorConfig, CriticConfig, RewardModelConfig
from mcore_rl.config.reward import JudgeConfig
from mcore_rl.config.schema import Config, ModelConfig, RolloutConfig


@dataclass(frozen=True)
class KeyNames:
    """Names of configuration keys as error messages show them.

    `prefix` is the key of a section. `checkpoint` is the key of the model's HF directory.
    """

    prefix: str
    checkpoint: str = "model.hf_path"

    def key(self, name: str) -> str:
        """Return the full key of `name`: `parallel.tp` is critic.parallel.tp for the critic."""
        return f"{self.prefix}.{name}"


POLICY = KeyNames("actor")
ROLLOUT = KeyNames("rollout")


@dataclass(frozen=True, kw_only=True)
class ModelRole(KeyNames):
    """A model on Megatron ranks. `model` is the model section with the checkpoint of this role."""

    section: ActorConfig
    model: ModelConfig

    @classmethod
    def policy(cls, config: Config) -> ModelRole:
        return cls("actor", section=config.actor, model=config.model)

    @classmethod
    def critic(cls, config: Config) -> ModelRole:
        return cls._value_model("critic", config.critic, config.model)

    @classmethod
    def reward_model(cls, config: Config) -> ModelRole:
        return cls._value_model("reward_model", config.reward_model, config.model)

    @classmethod
    def reference(cls, config: Config) -> ModelRole:
        """Return the frozen policy of algorithm.kl at reference.hf_path, in the actor's layout."""
        path = config.reference.hf_path
        assert path is not None
        own = replace(config.model, hf_path=path, random_init=False)
        return cls("actor", "reference.hf_path", section=config.actor, model=own)

    @classmethod
    def judge(cls, config: Config) -> ModelRole:
        """Return the judge's weights, as its engines load them: without multi-token prediction."""
        role = EngineRole.judge(config)
        return cls(role.prefix, role.checkpoint, section=ActorConfig(), model=role.model)

    @classmethod
    def _value_model(cls, prefix: str, section: CriticConfig | RewardModelConfig, model: ModelConfig) -> ModelRole:
        if section.hf_path is None:  # starts from the policy's checkpoint, so errors name the policy's key
            return cls(prefix, section=section, model=model)
        own = replace(model, hf_path=section.hf_path)
        return cls(prefix, f"{prefix}.hf_path", section=section, model=own)


@dataclass(frozen=True, kw_only=True)
class EngineRole(KeyNames):
    """A model on inference engines: the policy in the rollout, or the judge."""

    section: RolloutConfig
    model: ModelConfig
    tokenizer: str = "model.tokenizer_path"
    """Key of the tokenizer."""

    @classmethod
    def rollout(cls, config: Config) -> EngineRole:
        return cls("rollout", section=config.rollout, model=config.model)

    @classmethod
    def judge(cls, config: Config) -> EngineRole:
        """Return the judge on engines of the run. Its section has the values that judge shares with rollout."""
        judge, names = config.judge, {field.name for field in fields(RolloutConfig)}
        assert judge.hf_path is not None
        shared = {field.name: getattr(judge, field.name) for field in fields(JudgeConfig) if field.name in names}
        shared["engine"] = judge.engine or config.rollout.engine
        model = replace(
            config.model,
            hf_path=judge.hf_path,
            tokenizer_path=judge.tokenizer_path,
            dtype=judge.dtype or config.model.dtype,
            random_init=False,
        )
        return cls(
            "judge",
            "judge.hf_path",
            section=RolloutConfig(**shared),
            model=model,
            tokenizer="judge.tokenizer_path",
        )
