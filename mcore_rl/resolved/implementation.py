"""Selection of the components that a model is built from, with reasons: TransformerEngine's or Megatron's local layers,
attention, grouped GEMM, dispatcher, FP8. Imports neither Megatron nor torch: the driver, `plan` and `doctor` use it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from mcore_rl.config.models import ActorConfig, ModelConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import resolved_dtype
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.attention import HeadDims, check_torch_flash, pick
from mcore_rl.resolved.installed import Installed, dotted, release
from model_converters.mapping.layout import TrainLayout

if TYPE_CHECKING:
    from model_converters.families.parts.arguments import TransformerArguments

PERMUTE_FUSION_VERSION = (2, 1)
GROUPED_GEMM_VERSION = (1, 9)
"""Oldest versions of TransformerEngine whose kernels Megatron (0.16.1) uses."""


@dataclass(frozen=True)
class Recipe:
    """FP8 recipe. `format` is Megatron's name. Requires at least these versions of TransformerEngine and CUDA, a GPU
    with compute capability from `capability` to below `below`, and rows of a multiple of `tokens` tokens."""

    format: str
    engine: tuple[int, int]
    capability: tuple[int, int]
    tokens: int = 16
    below: tuple[int, int] | None = None
    cuda: tuple[int, int] = (12, 1)

    def lacks(self, installed: Installed) -> str:
        """Return why this machine does not support the recipe, as the rest of a sentence about it; "" if it does."""
        engine = installed.transformer_engine
        if engine is None or release(engine) < self.engine:
            return f"needs transformer-engine {dotted(self.engine)} or newer, but {engine or 'none'} is installed"
        if installed.cuda_version is not None and installed.cuda_version < self.cuda:
            return f"needs a torch for CUDA {dotted(self.cuda)} or newer, not {dotted(installed.cuda_version)}"
        found, before = installed.capability, self.below
        # The capability is unknown in a plan, which assumes that the GPUs support the recipe.
        if found is None or (found >= self.capability and (before is None or found < before)):
            return ""
        until = f", before {dotted(before)}" if before else ""
        return (
            f"needs a GPU of compute capability {dotted(self.capability)} or newer{until}, but this one has "
            f"{dotted(found)}"
        )


RECIPES = {
    "delayed": Recipe("hybrid", (1, 11), (8, 9)),
    "tensorwise": Recipe("hybrid", (2, 2), (8, 9)),
    "blockwise": Recipe("e4m3", (2, 3), (9, 0), cuda=(12, 9)),
    "mxfp8": Recipe("e4m3", (2, 1), (10, 0), tokens=32, below=(12, 0)),
}
"""Source: megatron.core.fp8_utils (0.16.1), and the checks in TransformerEngine's pytorch/quantization.py (2.11)."""


TRANSFORMERS_EXPERTS = "grouped_mm"
"""Value of transformers' experts_implementation: one grouped product of torch for all experts, on CPUs too, where it
has the same bits as one product per expert."""


def row_multiple(fp8: str) -> int:
    """Return the number of tokens of which each rank's part of a packed row must be a multiple."""
    return 1 if fp8 == "none" else RECIPES[fp8].tokens


@dataclass(frozen=True)
class BuildRequest:
    """Model and layout that determine the implementation. `sizes` is ModelArguments.transformer. Without gpus_per_node,
    all experts count as being on one node. `rotation_factor` is the factor on the rotary embedding's cosines."""

    role: ModelRole
    sizes: TransformerArguments
    layout: TrainLayout
    gpus_per_node: int | None = None
    rotation_factor: float = 1.0

    @property
    def experts(self) -> bool:
        return bool(self.sizes.get("num_moe_experts"))

    @property
    def adapters(self) -> bool:
        return self.role.section.lora.rank > 0

    @property
    def heads(self) -> HeadDims:
        sizes = self.sizes
        if sizes.get("multi_latent_attention"):
            return HeadDims(sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"], sizes["v_head_dim"])
        return HeadDims(sizes["kv_channels"], sizes["kv_channels"])


USUAL = BuildRequest(
    ModelRole.policy(ActorConfig(), ModelConfig(hf_path="")),
    {"num_moe_experts": 2, "kv_channels": 128},
    TrainLayout(2, ep=2),
    gpus_per_node=1,
)
"""Mixture-of-experts model on several nodes with the head size of most models, for doctor, which has no model."""


SDPA = "SDPA"
TORCH_FLASH = "torch's flash"
"""Attention of this project (mcore_rl.megatron.model.attention); other names are TransformerEngine's backends."""


@dataclass(frozen=True)
class Component:
    """Selected component: `value` is for Megatron's arguments and for display."""

    value: str
    why: str


@dataclass(frozen=True)
class Implementation:
    """Components of a model; the fields are the lines of doctor's table."""

    layers: Component
    attention: Component
    linear_attention: Component
    norm: Component
    rope: Component
    experts: Component
    permute: Component
    dispatcher: Component
    fp8: Component
    gradient_accumulation: Component

    @property
    def transformer_engine(self) -> bool:
        return self.layers.value == "TransformerEngine"

    @property
    def own_attention(self) -> bool:
        """True if the core attention is this project's, also in TransformerEngine's layers."""
        return self.attention.value in (SDPA, TORCH_FLASH)

    @property
    def grouped_gemm(self) -> bool:
        return self.experts.value == "grouped GEMM"

    def choices(self) -> Iterator[tuple[str, Component]]:
        """Yield (name, choice) of every component."""
        for field in fields(self):
            yield field.name.replace("_", " "), getattr(self, field.name)

    def arguments(self) -> dict[str, object]:
        """Return the arguments of TransformerConfig."""
        deep_ep = self.dispatcher.value == "deepep"
        arguments: dict[str, object] = {
            "apply_rope_fusion": self.rope.value == "fused",
            "bias_dropout_fusion": self.transformer_engine,
            "gradient_accumulation_fusion": self.gradient_accumulation.value == "fused",
            "moe_grouped_gemm": self.grouped_gemm,
            "moe_permute_fusion": self.permute.value == "fused",
            # flex is Megatron's dispatcher that calls DeepEP.
            "moe_token_dispatcher_type": "flex" if deep_ep else self.dispatcher.value,
        }
        if deep_ep:
            arguments["moe_flex_dispatcher_backend"] = "deepep"
        if self.fp8.value != "none":
            arguments |= {"fp8": RECIPES[self.fp8.value].format, "fp8_recipe": self.fp8.value}
        return arguments


def choose(installed: Installed, request: BuildRequest) -> Implementation:
    """Select the best available components. Explicitly requested ones that are missing are rejected.

    Raises: ConfigError naming the key.
    """
    layers = _layers(installed, request)
    engine = layers.value == "TransformerEngine"
    experts = permute = Component("none", "the model has no experts")
    if request.experts and request.layout.hf_tensors:
        experts = Component(TRANSFORMERS_EXPERTS, "transformers' experts, with torch's grouped product")
        permute = Component("transformers", "comes with its layers")
    elif request.experts:
        experts = _expert_kernel("grouped GEMM", GROUPED_GEMM_VERSION, "grouped GEMM", "one by one", installed, engine)
        permute = _expert_kernel("fused permutation", PERMUTE_FUSION_VERSION, "fused", "unfused", installed, engine)
    return Implementation(
        layers=layers,
        attention=_attention(installed, engine, request),
        linear_attention=_linear_attention(installed, request),
        norm=_norm(layers),
        rope=_rope(engine, request),
        experts=experts,
        permute=permute,
        dispatcher=_dispatcher(installed, request),
        fp8=_fp8(installed, engine, request),
        gradient_accumulation=_gradient_accumulation(installed, request),
    )


def _layers(installed: Installed, request: BuildRequest) -> Component:
    if request.layout.hf_tensors:
        strategy = f"{request.role.key('strategy')}={request.role.section.strategy}"
        if request.sizes.get("linear_attention_freq"):
            raise ConfigError(
                f"{strategy} is not supported for linear attention (linear_num_key_heads), whose state would cross the "
                "sequences of a packed row; set it to megatron"
            )
        return Component("transformers", strategy)
    if not installed.cuda:
        return Component("local", "TransformerEngine's layers need a CUDA device")
    if installed.transformer_engine is None:
        return Component("local", "transformer-engine is not installed")
    if request.adapters:
        return Component("local", "adapters need a projection's input, which TransformerEngine normalizes internally")
    return Component("TransformerEngine", f"transformer-engine {installed.transformer_engine} is installed")


def _norm(layers: Component) -> Component:
    if layers.value == "local":
        return Component("torch RMSNorm", "local layers")
    return Component(layers.value, "comes with its layers")


def _attention(installed: Installed, engine: bool, request: BuildRequest) -> Component:
    if not installed.cuda:
        return _sdpa(request)
    _check_indexer(request)
    dtype = resolved_dtype(request.role.model.dtype, cuda=True)
    if reason := _needs_flash(engine, request):
        check_torch_flash(installed, dtype, request.heads, reason, request.role)
        return Component(TORCH_FLASH, reason)
    if not engine:
        return _sdpa(request)
    # TransformerEngine's layers exist on GPUs only, where the dtype auto is bfloat16.
    backend = pick(installed, dtype, request.heads, request.role)
    return Component(backend.name, f"TransformerEngine's first choice for packed rows; it needs {backend.needs}")


def _sdpa(request: BuildRequest) -> Component:
    whose = "transformers'" if request.layout.hf_tensors else "megatron's local"
    return Component(SDPA, f"torch's, sequence by sequence: {whose} attention takes no packed rows")


def _check_indexer(request: BuildRequest) -> None:
    """Raise ConfigError for the choices of an indexer, which no attention on GPUs computes."""
    if request.sizes.get("dsa_indexer_topk"):
        raise ConfigError(
            f"{request.role.checkpoint}: no attention for packed rows on GPUs supports the choices of an indexer "
            "(index_topk): that of megatron-core 0.16.1 rejects packed rows and rotates the wrong part of released "
            "weights (0.20.0 corrects the rotation); train this model on CPUs, or use another model"
        )


def _needs_flash(engine: bool, request: BuildRequest) -> str:
    """Return why a model on GPUs needs this project's attention with torch's flash attention; "" if it does not.

    Source: TransformerEngine 2.11 and 2.12, get_attention_backend (softmax_type, qkv_format thd) and
    attn_forward_func_with_cp. Every backend of `attention.BACKENDS` supports windows on one rank.
    """
    sizes, several = request.sizes, request.layout.cp > 1
    if sizes.get("softmax_type", "vanilla") != "vanilla":
        return "TransformerEngine 2.11 has no sinks in packed rows (2.12 has them with cuDNN 9.18)"
    if sizes.get("window_size"):
        if not engine:
            return "torch's SDPA has no sliding windows"
        if several:
            return "TransformerEngine's ring of context-parallel ranks has no sliding windows"
    if several and not engine:
        return "torch's SDPA has no context parallelism"
    return ""


def _linear_attention(installed: Installed, request: BuildRequest) -> Component:
    """Select the kernels of gated delta rules; mcore_rl.megatron.model.linear_attention follows the same rule."""
    if not any(request.sizes.get("linear_attention_freq", [])):
        return Component("none", "the model has no linear attention")
    if not installed.cuda:
        return Component("torch", "chunk by chunk: the kernels of fla need a CUDA device")
    if resolved_dtype(request.role.model.dtype, cuda=True) == "float32":
        return Component("torch", "chunk by chunk: the kernels of fla take no float32")
    if installed.linear_attention is None:
        raise ConfigError(
            f"{request.role.checkpoint}: the model has linear attention, which on GPUs needs the package "
            "flash-linear-attention; install it on every host"
        )
    return Component("fla", f"flash-linear-attention {installed.linear_attention} is installed")


def _rope(engine: bool, request: BuildRequest) -> Component:
    if request.sizes.get("multi_latent_attention"):
        return Component("unfused", "megatron's fused RoPE for latent attention is experimental and supports yarn only")
    if not engine:
        return Component("unfused", "fused RoPE needs TransformerEngine's layers")
    if request.sizes.get("mrope_section"):
        return Component("unfused", "fused RoPE of packed rows has one angle per position, not per token (mrope)")
    if request.sizes.get("rotary_interleaved"):
        # The same branch passes no `interleaved`.
        return Component("unfused", "fused RoPE of packed rows rotates halves of a head, not neighbours (interleaved)")
    if request.rotation_factor != 1:
        # megatron-core 0.16.1, rope_utils.apply_rotary_pos_emb: the branch of packed rows passes no mscale.
        return Component(
            "unfused",
            f"fused RoPE of packed rows ignores the factor {request.rotation_factor:.4g} on cosines and sines",
        )
    return Component("fused", "TransformerEngine's")


def _expert_kernel(
    name: str, version: tuple[int, int], chosen: str, otherwise: str, installed: Installed, engine: bool
) -> Component:
    if not engine:
        return Component(otherwise, f"{name} needs TransformerEngine's layers")
    if release(installed.transformer_engine) < version:
        return Component(otherwise, f"{name} needs transformer-engine {dotted(version)}")
    return Component(chosen, "TransformerEngine's")


def _dispatcher(installed: Installed, request: BuildRequest) -> Component:
    if not request.experts:
        return Component("alltoall", "the model has no experts")
    if request.layout.hf_tensors:
        return Component("alltoall", "not used: every rank gathers all experts of a layer")
    configured = request.role.section.moe.dispatcher
    if configured != "auto":
        _check_dispatcher(installed, request)
        return Component(configured, f"{request.role.key('moe.dispatcher')}={configured}")
    # The ranks that hold all experts once are consecutive, and consecutive ranks fill a node.
    if request.gpus_per_node is None or request.layout.ep * request.layout.etp <= request.gpus_per_node:
        return Component("alltoall", "all experts are on one node")
    if not installed.cuda:
        return Component("alltoall", "deepep needs a CUDA device")
    if resolved_dtype(request.role.model.dtype, cuda=True) == "float16":
        return Component("alltoall", "deepep exchanges tokens in bfloat16 only")
    if not installed.deep_ep:
        return Component("alltoall", "experts are spread over nodes, but deep_ep is not installed, or is not DeepEP 1")
    return Component("deepep", "experts are spread over nodes, and deep_ep is installed")


def _check_dispatcher(installed: Installed, request: BuildRequest) -> None:
    role, layout, dispatcher = request.role, request.layout, request.role.section.moe.dispatcher
    key_of_ep = role.key("parallel.ep")
    problem = None
    if dispatcher == "allgather" and layout.ep > 1:
        problem = (
            "supports rows of equal length only, but packed rows differ between the ranks of "
            f"{key_of_ep}={layout.ep}; set it to alltoall"
        )
    elif dispatcher == "allgather" and layout.pp > 1:
        problem = "is not supported by megatron with pipeline stages and packed rows; set it to alltoall"
    elif dispatcher == "deepep" and not installed.cuda:
        problem = "needs a CUDA device; set it to auto or alltoall"
    elif dispatcher == "deepep" and not installed.deep_ep:
        problem = "needs the package deep_ep of DeepEP 1; set it to auto or alltoall"
    elif dispatcher == "deepep" and layout.tp * layout.ep == 1:
        problem = f"needs {key_of_ep} > 1 (or tp > 1); set it to auto or alltoall"
    if problem:
        raise ConfigError(f"{role.key('moe.dispatcher')}={dispatcher} {problem}")


def _fp8(installed: Installed, engine: bool, request: BuildRequest) -> Component:
    fp8, key = request.role.section.fp8, request.role.key("fp8")
    if fp8 != "none":
        if not installed.cuda:
            raise ConfigError(f"{key}={fp8} needs a CUDA device; set it to none")
        lacks = RECIPES[fp8].lacks(installed) or ("" if engine else "needs layers of transformer-engine")
        if lacks:
            raise ConfigError(f"{key}={fp8} {lacks}; set {key} to another recipe or none")
    return Component(fp8, f"{key}={fp8}")


def _gradient_accumulation(installed: Installed, request: BuildRequest) -> Component:
    if not installed.cuda:
        return Component("unfused", "fused accumulation needs a CUDA device")
    if request.role.section.quantization_aware:
        return Component("unfused", "rounded weights have no gradient buffer to which a kernel could add")
    if request.layout.shard_parameters:
        return Component("unfused", "gathered parameters have no gradient buffer to which a kernel could add")
    if not installed.gradient_fusion:
        # TransformerEngine has its own kernel, but Megatron's output projection requires apex's (0.16.1).
        return Component("unfused", "NVIDIA apex with fused_weight_gradient_mlp_cuda is not installed")
    return Component("fused", "apex is installed")
