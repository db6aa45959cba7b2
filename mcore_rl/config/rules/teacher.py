"""Rules for the teacher of a distillation run."""

from __future__ import annotations

from mcore_rl.config.algorithm import AlgorithmConfig, is_supervised
from mcore_rl.config.fields import reject_unless_default
from mcore_rl.config.models import TeacherConfig
from mcore_rl.config.reward import NO_RULE
from mcore_rl.config.rules.estimators import OF_TOKENS
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError


def uses_teacher(teacher: TeacherConfig) -> bool:
    """Return True if the policy learns from a teacher."""
    return teacher.hf_path is not None


def replaces_rewards(teacher: TeacherConfig) -> bool:
    """Return True if the policy learns from the teacher and not from rewards."""
    return uses_teacher(teacher) and teacher.alone


def check_teacher(config: Config) -> None:
    """Raise ConfigError for a key that has no effect or that another key excludes."""
    teacher, algorithm = config.teacher, config.algorithm
    if not uses_teacher(teacher):
        reject_unless_default("teacher", teacher, "set teacher.hf_path")
        return
    if is_supervised(algorithm):
        raise ConfigError(
            f"teacher.hf_path={teacher.hf_path}: the teacher computes probabilities of sampled responses, and "
            f"algorithm.policy_loss.name={algorithm.policy_loss.name} samples none; set it to null"
        )
    if not teacher.in_advantage and not teacher.in_loss:
        raise ConfigError(
            f"teacher.hf_path={teacher.hf_path} has no effect with teacher.in_advantage=0 and teacher.in_loss=0: set "
            "teacher.in_advantage=1 for the teacher's log-probabilities in the advantages, teacher.in_loss=1 for the "
            "reverse KL in the loss, or teacher.hf_path to null"
        )
    if config.rollout.keep_sampling_mask:
        raise ConfigError(
            f"teacher.hf_path={teacher.hf_path}: the teacher's distribution covers the whole vocabulary, and "
            "rollout.keep_sampling_mask=true trains on the sampled sets; sample from all tokens with "
            "rollout.keep_sampling_mask=false, or set teacher.hf_path to null"
        )
    if not teacher.in_loss:
        reject_unless_default("teacher", teacher, "set teacher.in_loss above 0", ("top_k",))
    if not teacher.top_k:
        reject_unless_default("teacher", teacher, "set teacher.top_k above 0", ("rest",))
    if teacher.alone:
        _check_alone(algorithm)
    if config.reward.function == NO_RULE and teacher.alone and algorithm.dynamic_sampling.enable:
        raise ConfigError(
            "algorithm.dynamic_sampling.enable=true drops groups of equal rewards, and with reward.function=none all "
            "rewards are 0; set it to false"
        )


def _check_alone(algorithm: AlgorithmConfig) -> None:
    """Reject settings of advantages, which teacher.alone drops."""
    kl, sources = algorithm.kl.in_reward, [entry.source for entry in algorithm.per_source if entry.has_estimator]
    for given, key, remedy in (
        (algorithm.length_penalty > 0, f"algorithm.length_penalty={algorithm.length_penalty:g}", "set it to 0"),
        (kl > 0, f"algorithm.kl.in_reward={kl:g}", "set it to 0, and algorithm.kl.in_loss instead"),
        (
            algorithm.advantage == OF_TOKENS,
            f"algorithm.advantage={OF_TOKENS}",
            "set it to an estimator without a pass, such as grpo",
        ),
        (bool(sources), f"algorithm.per_source, {', '.join(sources)}: advantage", "leave only source and weight"),
        (algorithm.baseline == "source", "algorithm.baseline=source", "set it to prompt"),
    ):
        if given:
            raise ConfigError(
                f"{key} has no effect with teacher.alone=true, which drops the advantages of rewards; {remedy}"
            )
