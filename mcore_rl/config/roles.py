"""The part of the configuration that describes one model of a run, with the names of its keys for error messages.

Policy, critic, reward model and teacher are checked and built by the same code from sections of their own, and the
engines of rollout and judge likewise. That code gets a role instead of the whole configuration. Functions that need no
section take `names` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcore_rl.config.models import (
    ActorConfig,
    CriticConfig,
    LoraConfig,
    ModelConfig,
    MoeConfig,
    ReferenceConfig,
    RewardModelConfig,
    TeacherConfig,
    TeacherSourceConfig,
)
from mcore_rl.config.reward import JudgeConfig
from mcore_rl.config.schema import RolloutConfig


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

    @property
    def dtype_key(self) -> str:
        """Key of the data type of the parameters."""
        return self.key("dtype") if self.prefix in ("teacher", "judge") else "model.dtype"


POLICY = KeyNames("actor")
ROLLOUT = KeyNames("rollout")


@dataclass(frozen=True, kw_only=True)
class ModelRole(KeyNames):
    """A model on Megatron ranks. `model` is the model section with the checkpoint of this role."""

    section: ActorConfig
    model: ModelConfig

    @classmethod
    def policy(cls, actor: ActorConfig, model: ModelConfig) -> ModelRole:
        return cls("actor", section=actor, model=model)

    @classmethod
    def critic(cls, critic: CriticConfig, model: ModelConfig) -> ModelRole:
        return cls._value_model("critic", critic, model)

    @classmethod
    def reward_model(cls, reward_model: RewardModelConfig, model: ModelConfig) -> ModelRole:
        return cls._value_model("reward_model", reward_model, model)

    @classmethod
    def reference(cls, reference: ReferenceConfig, actor: ActorConfig, model: ModelConfig) -> ModelRole:
        """Return the frozen policy of algorithm.kl at reference.hf_path, in the actor's layout."""
        assert reference.hf_path is not None
        # The reference is loaded even if the policy starts from random weights.
        own = replace(model, hf_path=reference.hf_path, random_init=False)
        return cls("actor", "reference.hf_path", section=actor, model=own)

    @classmethod
    def teacher(cls, teacher: TeacherSourceConfig, actor: ActorConfig, model: ModelConfig) -> ModelRole:
        """Return a teacher in the actor's layout, without the parts of the actor that belong to training."""
        directory = model.hf_path if teacher.averages else teacher.directory
        own = replace(model, hf_path=directory, random_init=False)
        section = replace(
            actor,
            moe=MoeConfig(dispatcher=actor.moe.dispatcher),
            lora=LoraConfig(),
            mtp_loss_coefficient=0.0,
            train_vision=False,
            fp8="none",
            quantization_aware=0,
        )
        return cls("actor", teacher.chosen, section=section, model=own)

    @classmethod
    def teacher_ranks(
        cls, section: TeacherConfig, teacher: TeacherSourceConfig, actor: ActorConfig, model: ModelConfig
    ) -> ModelRole:
        """Return a teacher on ranks of its own."""
        own = replace(model, hf_path=teacher.directory, dtype=section.dtype or model.dtype, random_init=False)
        ranks = ActorConfig(
            strategy=section.strategy,
            parallel=section.parallel,
            num_ranks=section.num_ranks,
            tokens_per_microbatch=section.tokens_per_microbatch,
            logprob_chunk_tokens=actor.logprob_chunk_tokens,
            moe=MoeConfig(dispatcher=section.moe.dispatcher),
            fp8=section.fp8,
        )
        return cls("teacher", teacher.chosen, section=ranks, model=own)

    @classmethod
    def on_engines(cls, engines: EngineRole) -> ModelRole:
        """Return the weights of a judge or a teacher, as its engines load them: without multi-token prediction."""
        # No key of a trained model applies to it, so its section has the defaults.
        return cls(engines.prefix, engines.checkpoint, section=ActorConfig(), model=engines.model)

    @classmethod
    def _value_model(cls, prefix: str, section: CriticConfig | RewardModelConfig, model: ModelConfig) -> ModelRole:
        if section.hf_path is None:  # starts from the policy's checkpoint, so errors name the policy's key
            return cls(prefix, section=section, model=model)
        return cls(prefix, f"{prefix}.hf_path", section=section, model=replace(model, hf_path=section.hf_path))


@dataclass(frozen=True, kw_only=True)
class EngineRole(KeyNames):
    """A model on inference engines: the policy in the rollout, the judge, or a teacher."""

    section: RolloutConfig
    model: ModelConfig
    tokenizer: str = "model.tokenizer_path"
    """Key of the tokenizer."""
    dtype_source: str = "model.dtype"
    """Key whose value `model.dtype` is: `dtype_key`, or model.dtype where it is null."""

    @classmethod
    def rollout(cls, rollout: RolloutConfig, model: ModelConfig) -> EngineRole:
        return cls("rollout", section=rollout, model=model)

    @classmethod
    def teacher(
        cls, section: TeacherConfig, teacher: TeacherSourceConfig, rollout: RolloutConfig, model: ModelConfig
    ) -> EngineRole:
        """Return a teacher on vLLM engines of the run, which compute the policy's sequences and one more token."""
        shared = vars(section).keys() & vars(RolloutConfig()).keys()
        engines = RolloutConfig(**{name: getattr(section, name) for name in shared})
        # vLLM samples a token after every sequence that it computes.
        longest = rollout.max_response_tokens + 1
        engines = replace(
            engines, engine="vllm", max_prompt_tokens=rollout.max_prompt_tokens, max_response_tokens=longest
        )
        own = replace(model, hf_path=teacher.directory, dtype=section.dtype or model.dtype, random_init=False)
        source = "teacher.dtype" if section.dtype else "model.dtype"
        return cls("teacher", teacher.chosen, section=engines, model=own, dtype_source=source)

    @classmethod
    def judge(cls, judge: JudgeConfig, rollout: RolloutConfig, model: ModelConfig) -> EngineRole:
        """Return the judge on engines of the run. Its section has the values that judge shares with rollout."""
        assert judge.hf_path is not None
        # Keys of the same name have the same meaning in both sections.
        shared = vars(judge).keys() & vars(RolloutConfig()).keys()
        section = RolloutConfig(**{name: getattr(judge, name) for name in shared})
        own = replace(
            model,
            hf_path=judge.hf_path,
            tokenizer_path=judge.tokenizer_path,
            dtype=judge.dtype or model.dtype,
            random_init=False,
            float32_head=False,  # no trainer computes the judge's log-probabilities
            float32_router=False,
        )
        return cls(
            "judge",
            "judge.hf_path",
            section=replace(section, engine=judge.engine or rollout.engine),
            model=own,
            tokenizer="judge.tokenizer_path",
            dtype_source="judge.dtype" if judge.dtype else "model.dtype",
        )
