"""Activation recomputation in the backward pass. Does not import megatron.core, so that the driver can use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mcore_rl.config.models import ActorConfig
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.implementation import Implementation
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments

if TYPE_CHECKING:
    from mcore_rl.resolved.model import ResolvedModel

Missing = Callable[[TransformerArguments, Implementation], str]


def _needs(present: Callable[[TransformerArguments], object], what: str) -> Missing:
    return lambda sizes, _: "" if present(sizes) else f"the model has no {what}"


def _lacks_grouped_gemm(sizes: TransformerArguments, implementation: Implementation) -> str:
    if not sizes.get("num_moe_experts"):
        return "the model has no experts"
    return "" if implementation.grouped_gemm else f"it needs grouped GEMM, but {implementation.experts.why}"


def _lacks_norms(sizes: TransformerArguments, implementation: Implementation) -> str:
    apart = sizes.get("num_moe_experts") or sizes.get("multi_latent_attention")
    if apart or not implementation.transformer_engine:
        return ""
    return "TransformerEngine fuses the model's norms into the following projections, so they store no activations"


MODULES: dict[str, Missing] = {
    "core_attn": _needs(lambda sizes: True, "attention"),
    "layernorm": _lacks_norms,
    # Without moe_layer_freq, all layers of a model with experts have them.
    "mlp": _needs(
        lambda sizes: not (sizes.get("num_moe_experts") and all(sizes.get("moe_layer_freq", [1]))),
        "dense feed-forward layers",
    ),
    "moe": _needs(lambda sizes: sizes.get("num_moe_experts"), "experts"),
    "moe_act": _lacks_grouped_gemm,
    "shared_experts": _needs(lambda sizes: sizes.get("moe_shared_expert_intermediate_size"), "shared experts"),
    "mla_up_proj": _needs(lambda sizes: sizes.get("multi_latent_attention"), "latent attention"),
}
"""Module of selective recomputation -> function that returns why a model does not support it ("": it does).
Source: megatron.core.transformer.transformer_config (0.16.1)."""


def recompute_arguments(spec: ResolvedModel, implementation: Implementation) -> dict[str, object]:
    """Return the arguments of TransformerConfig.

    Raises: ConfigError naming the key.
    """
    role, section = spec.role, spec.role.section
    if section.recompute == "none":
        return {}
    if section.recompute == "full":
        _check_layers(spec)
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": section.recompute_layers,
        }
    modules = recomputed_modules(section, spec.arguments, implementation)
    key = f"{role.key('recompute_modules')}={','.join(modules)}"
    if len(set(modules)) < len(modules):
        raise ConfigError(f"{key} must name modules, each once")
    for module in modules:
        if module not in MODULES:
            raise ConfigError(f"{key}: {module} is not known; known: {', '.join(MODULES)}")
        missing = MODULES[module](spec.arguments.transformer, implementation)
        if missing:
            raise ConfigError(f"{key}: {module}: {missing}; leave it out")
        if module in ("moe_act", "layernorm") and implementation.fp8.value == "delayed":
            raise ConfigError(f"{key}: {module} cannot be recomputed with {role.key('fp8')}=delayed; leave it out")
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def recomputed_modules(actor: ActorConfig, arguments: ModelArguments, implementation: Implementation) -> list[str]:
    """Return the modules of selective recomputation: the configured ones, or defaults for the model and its
    implementation.

    Torch's attention stores most of the activations, so it is recomputed alone. TransformerEngine's attention stores no
    scores; with it, recompute norms, activations of experts and up-projections of latent attention, which need no large
    matrix product, and feed-forward layers in models without experts.
    """
    if actor.recompute_modules:
        return list(actor.recompute_modules)
    if not implementation.transformer_engine:
        return ["core_attn"]
    # With delayed scaling, layernorm and moe_act cannot be recomputed (see recompute_arguments).
    sizes, delayed = arguments.transformer, implementation.fp8.value == "delayed"
    cheap = ["mla_up_proj"] if delayed else ["layernorm", "moe_act", "mla_up_proj"]
    if not sizes.get("num_moe_experts"):
        cheap.append("mlp")
    return [module for module in cheap if not MODULES[module](sizes, implementation)] or ["core_attn"]


def _check_layers(spec: ResolvedModel) -> None:
    """Check recompute_layers: Megatron 0.16.1 runs past the last layer of a stage if the number does not divide it."""
    layers = spec.role.section.recompute_layers
    key = f"{spec.role.key('recompute_layers')}={layers}"
    if layers > 1 and spec.arguments.mtp_num_layers:
        raise ConfigError(f"{key}: megatron recomputes multi-token-prediction layers one by one; set it to 1")
    stages = spec.layout.stage_layers(spec.arguments.transformer["num_layers"])
    layer_counts = {len(chunk) for chunks in stages for chunk in chunks}
    wrong = sorted(count for count in layer_counts if count % layers)
    if wrong:
        raise ConfigError(
            f"{key} does not divide the {wrong[0]} layers of a pipeline stage or chunk; set it to a divisor, such as 1"
        )
