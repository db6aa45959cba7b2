"""Construction of this rank's model chunks for policy and value models."""

from __future__ import annotations

from mcore_rl.config.roles import ModelRole
from mcore_rl.config.rules.lora import uses_lora
from mcore_rl.megatron.lora.weights import attach_adapters
from mcore_rl.megatron.model.loading import load_hf
from mcore_rl.megatron.model.model import build_model
from mcore_rl.megatron.model.output import PolicyModel
from mcore_rl.megatron.model.value_model import ValueModel
from mcore_rl.resolved.model import ResolvedModel


def policy_chunks(role: ModelRole, spec: ResolvedModel, *, gpus_per_node: int, seed: int) -> list[PolicyModel]:
    """Build this rank's chunks of the policy with the weights of model.hf_path and, in a LoRA run, adapters.

    With model.random_init the weights are random.

    Raises: ConfigError.
    Collective: all ranks, after join_ranks.
    """
    chunks = build_model(spec.hf_config, role.section, role.model, spec.layout, gpus_per_node=gpus_per_node)
    if not role.model.random_init:
        load_hf(chunks, role.model.hf_path, spec.layout)
    if uses_lora(role.section):
        attach_adapters(chunks, role.section.lora, spec.hf_config, spec.layout, seed=seed)
    return chunks


def value_chunks(role: ModelRole, spec: ResolvedModel, *, gpus_per_node: int) -> list[PolicyModel]:
    """Build this rank's chunks of a value model. The caller loads their weights.

    Raises: ConfigError.
    Collective: all ranks, after join_ranks.
    """
    return build_model(
        spec.hf_config,
        role.section,
        role.model,
        spec.layout,
        gpus_per_node=gpus_per_node,
        kind=ValueModel,
        names=role,
    )
