"""The teacher's model and layout, resolved next to the policy's."""

from __future__ import annotations

from dataclasses import replace

from mcore_rl.config.models import TeacherConfig, TeacherSourceConfig
from mcore_rl.config.roles import EngineRole, ModelRole
from mcore_rl.config.rules.teacher import teacher_prompt_tokens
from mcore_rl.config.schema import Config, RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.layout import model_arguments
from mcore_rl.resolved.model import ResolvedModel, policy_config
from model_converters.families.parts.arguments import ModelArguments


def resolved_teacher(teacher: TeacherConfig, entry: TeacherSourceConfig, policy: ResolvedModel) -> ResolvedModel:
    """Resolve the teacher of an entry in the process groups of the policy's ranks.

    A teacher without experts does not use the groups of actor.parallel.ep and etp, so it needs no such axis.

    Raises: ConfigError naming the teacher's key for a model that the policy's layout does not divide, or whose
    vocabulary or inputs differ from the policy's.
    """
    role, given = ModelRole.teacher(entry, policy.role.section, policy.role.model), entry.given
    sizes = model_arguments(policy_config(role)[0], role.checkpoint)
    reject_images(entry, sizes, policy.arguments)
    if not sizes.transformer.get("num_moe_experts"):
        role = _without_expert_axes(role)
    try:
        spec = ResolvedModel.policy(role, policy.layout.world_size)
    except ConfigError as error:
        raise ConfigError(
            f"{given} does not fit the layout of the actor, in which it runs: {error}; or set teacher.num_ranks and "
            "teacher.parallel for a layout of its own"
        ) from error
    if sizes.transformer.get("num_moe_experts") and spec.layout.etp != policy.layout.etp:
        raise ConfigError(
            f"{given} has experts that are divided over {spec.layout.etp} ranks, and the actor's ranks form groups of "
            f"{policy.layout.etp}; set actor.parallel.etp={spec.layout.etp}"
        )
    check_vocabulary_sizes(teacher, entry, spec.arguments.vocab_size, policy.arguments.vocab_size)
    return spec


def teacher_on_own_ranks(config: Config, entry: TeacherSourceConfig) -> ResolvedModel:
    """Resolve the teacher of an entry on ranks of its own, in the layout of teacher.parallel.

    A teacher without experts does not use the axes ep and etp if another teacher has experts.

    Raises: ConfigError naming the teacher's keys for a model that this layout does not divide.
    """
    entries = config.teacher.entries
    roles = [ModelRole.teacher_ranks(config.teacher, each, config.actor, config.model) for each in entries]
    role = roles[entries.index(entry)]
    if len(roles) > 1 and not _has_experts(role) and any(map(_has_experts, roles)):
        role = _without_expert_axes(role)
    return ResolvedModel.policy(role, config.teacher.num_ranks)


def _has_experts(role: ModelRole) -> bool:
    sizes = model_arguments(policy_config(role)[0], role.checkpoint)
    return bool(sizes.transformer.get("num_moe_experts"))


def _without_expert_axes(role: ModelRole) -> ModelRole:
    parallel = replace(role.section.parallel, ep=1, etp=None)
    return replace(role, section=replace(role.section, parallel=parallel))


def reject_images(entry: TeacherSourceConfig, teacher: ModelArguments, policy: ModelArguments) -> None:
    """Raise ConfigError if the teacher or the policy reads images."""
    if teacher.vision is not None or policy.vision is not None:
        which = "the teacher" if teacher.vision is not None else "model.hf_path"
        raise ConfigError(f"{entry.given}: {which} has a vision tower, and teachers read texts only; set it to null")


def teacher_sequences(config: Config) -> RolloutConfig:
    """Return the rollout section with the length of the prompts that teachers read."""
    return replace(config.rollout, max_prompt_tokens=teacher_prompt_tokens(config))


def teacher_on_engines(config: Config, entry: TeacherSourceConfig) -> EngineRole:
    """Return the role of the engines of an entry's teacher. model.float32_router applies if the teacher has experts.

    Raises: ConfigError for an unreadable config.json, or an unknown family.
    """
    role = EngineRole.teacher(config.teacher, entry, teacher_sequences(config), config.model)
    hf_config, _ = policy_config(ModelRole.on_engines(role))
    if model_arguments(hf_config, role.checkpoint).transformer.get("num_moe_experts"):
        return role
    return replace(role, model=replace(role.model, float32_router=False))


def check_vocabulary_sizes(teacher: TeacherConfig, entry: TeacherSourceConfig, theirs: int, ours: int) -> None:
    """Require that a teacher (vocab_size `theirs`) has a probability for every token of the policy (`ours`), and for
    the KL also the reverse.

    Published checkpoints of one tokenizer differ in the number of padding rows of their embeddings (vocab_size).
    """
    given = entry.given
    if theirs < ours:
        raise ConfigError(
            f"{given} has vocab_size {theirs} in config.json, and the policy {ours}: tokens of the policy would have "
            "no probability; set it to a teacher with the policy's vocabulary"
        )
    if teacher.in_loss and theirs != ours:
        raise ConfigError(
            f"teacher.in_loss={teacher.in_loss} compares distributions over one vocabulary, but {given} has vocab_size "
            f"{theirs} in config.json, and the policy {ours}; set teacher.in_loss=0 and teacher.in_advantage=1"
        )
    if teacher.top_k >= ours:
        raise ConfigError(
            f"teacher.top_k={teacher.top_k} must be below the {ours} tokens of the vocabulary; set it to 0 for all"
        )
