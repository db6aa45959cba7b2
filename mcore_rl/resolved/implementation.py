"""The one place that decides what a model is built from, and says why: TransformerEngine's layers or megatron's local
ones, attention, grouped GEMM, dispatcher, FP8. Imports neither megatron nor torch: the driver, `plan` and `doctor` ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from mcore_rl.config.roles import POLICY, KeyNames
from mcore_rl.config.rules.defaults import settled_dtype
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.attention import Heads, pick
from mcore_rl.resolved.fp8 import RECIPES, require_recipe
from mcore_rl.resolved.installed import Installed
from mcore_rl.resolved.versions import dotted, release

if TYPE_CHECKING:
    from mcore_rl.config.models import ActorConfig
    from mcore_rl.config.schema import ModelConfig
    from model_converters.families import ModelArguments
    from model_converters.mapping.layout import TrainLayout

PERMUTE_FUSION_VERSION = (2, 1)
GROUPED_GEMM_VERSION = (1, 9)
USUAL_HEADS = Heads(128, 128)


@dataclass(frozen=True)
class Wanted:
    """What a configuration asks for, and what of the model and its layout decides. `expert_ranks` hold all experts
    once; without gpus_per_node they count as those of one node."""

    experts: bool = False
    adapters: bool = False
    latent_attention: bool = False
    heads: Heads = USUAL_HEADS
    dtype: str = "bfloat16"
    fp8: str = "none"
    dispatcher: str = "auto"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    expert_ranks: int = 1
    gpus_per_node: int | None = None
    names: KeyNames = POLICY
    """Keys of the model's role, for errors."""


@dataclass(frozen=True)
class Choice:
    """`value` is what was chosen, for megatron's arguments and for people."""

    value: str
    why: str


@dataclass(frozen=True)
class Implementation:
    """What a model is built from. Fields are the lines of doctor's table."""

    layers: Choice
    attention: Choice
    norm: Choice
    rope: Choice
    experts: Choice
    permute: Choice
    dispatcher: Choice
    fp8: Choice
    gradient_accumulation: Choice

    @property
    def transformer_engine(self) -> bool:
        return self.layers.value == "TransformerEngine"

    @property
    def grouped_gemm(self) -> bool:
        return self.experts.value == "grouped GEMM"

    def choices(self) -> Iterator[tuple[str, Choice]]:
        """(name, choice) of every line."""
        for field in fields(self):
            yield field.name.replace("_", " "), getattr(self, field.name)

    def arguments(self) -> dict[str, Any]:
        """TransformerConfig's."""
        deep_ep = self.dispatcher.value == "deepep"
        arguments: dict[str, Any] = {
            "apply_rope_fusion": self.rope.value == "fused",
            "bias_dropout_fusion": self.transformer_engine,
            "gradient_accumulation_fusion": self.gradient_accumulation.value == "fused",
            "moe_grouped_gemm": self.grouped_gemm,
            "moe_permute_fusion": self.permute.value == "fused",
            "moe_token_dispatcher_type": "flex" if deep_ep else self.dispatcher.value,
        }
        if deep_ep:
            arguments["moe_flex_dispatcher_backend"] = "deepep"
        if self.fp8.value != "none":
            arguments |= {"fp8": RECIPES[self.fp8.value].format, "fp8_recipe": self.fp8.value}
        return arguments


def wanted(
    actor: ActorConfig,
    model: ModelConfig,
    layout: TrainLayout,
    arguments: ModelArguments,
    gpus_per_node: int | None = None,
    names: KeyNames = POLICY,
) -> Wanted:
    """What a configuration wants for a model in a layout."""
    sizes = arguments.transformer
    return Wanted(
        experts=bool(sizes.get("num_moe_experts")),
        adapters=actor.lora.rank > 0,
        latent_attention=bool(sizes.get("multi_latent_attention")),
        heads=_heads(sizes),
        dtype=model.dtype,
        fp8=actor.fp8,
        dispatcher=actor.moe.dispatcher,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        cp=layout.cp,
        expert_ranks=layout.ep * layout.etp,
        gpus_per_node=gpus_per_node,
        names=names,
    )


def _heads(sizes: dict[str, Any]) -> Heads:
    if sizes.get("multi_latent_attention"):
        return Heads(sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"], sizes["v_head_dim"])
    return Heads(sizes["kv_channels"], sizes["kv_channels"])


def choose(installed: Installed, wanted: Wanted) -> Implementation:
    """The best that is installed; what is asked for by name and missing is refused.

    Raises: ConfigError naming the key.
    """
    layers = _layers(installed, wanted)
    engine = layers.value == "TransformerEngine"
    return Implementation(
        layers=layers,
        attention=_attention(installed, engine, wanted),
        norm=Choice("TransformerEngine", "comes with its layers")
        if engine
        else Choice("torch RMSNorm", "local layers"),
        rope=_rope(engine, wanted),
        experts=_experts(installed, engine, wanted),
        permute=_permute(installed, engine, wanted),
        dispatcher=_dispatcher(installed, wanted),
        fp8=_fp8(installed, engine, wanted),
        gradient_accumulation=_gradient_accumulation(installed),
    )


def _layers(installed: Installed, wanted: Wanted) -> Choice:
    if not installed.cuda:
        return Choice("local", "TransformerEngine's layers need a CUDA device")
    if installed.transformer_engine is None:
        return Choice("local", "transformer-engine is not installed")
    if wanted.adapters:
        return Choice("local", "adapters read a projection's input, which TransformerEngine normalises inside of it")
    return Choice("TransformerEngine", f"transformer-engine {installed.transformer_engine} is installed")


def _attention(installed: Installed, engine: bool, wanted: Wanted) -> Choice:
    if engine:
        backend = pick(installed, settled_dtype(wanted.dtype, cuda=True), wanted.heads, wanted.names.checkpoint)
        return Choice(backend.name, f"TransformerEngine's first choice for packed rows; it needs {backend.needs}")
    if installed.cuda and wanted.cp > 1:
        key, lora = wanted.names.key("parallel.cp"), wanted.names.key("lora.rank")
        remedy = f"set {lora}=0 or {key}=1" if wanted.adapters else f"install transformer-engine or set {key}=1"
        whose = "those of a model with adapters are megatron's local ones" if wanted.adapters else "it is not installed"
        raise ConfigError(
            f"{key}={wanted.cp}: on GPUs context-parallel ranks need TransformerEngine's layers, but {whose}; {remedy}"
        )
    return Choice("SDPA", "torch's, sequence by sequence: megatron's local attention takes no packed rows")


def _rope(engine: bool, wanted: Wanted) -> Choice:
    if wanted.latent_attention:
        return Choice("unfused", "megatron's fused one for latent attention is experimental and takes yarn only")
    if not engine:
        return Choice("unfused", "the fused one is TransformerEngine's")
    return Choice("fused", "TransformerEngine's")


def _experts(installed: Installed, engine: bool, wanted: Wanted) -> Choice:
    if not wanted.experts:
        return Choice("none", "the model has no experts")
    if not engine:
        return Choice("one by one", "grouped GEMM is TransformerEngine's")
    if release(installed.transformer_engine) < GROUPED_GEMM_VERSION:
        return Choice("one by one", f"grouped GEMM needs transformer-engine {dotted(GROUPED_GEMM_VERSION)}")
    return Choice("grouped GEMM", "TransformerEngine's")


def _permute(installed: Installed, engine: bool, wanted: Wanted) -> Choice:
    if not wanted.experts:
        return Choice("none", "the model has no experts")
    if not engine:
        return Choice("unfused", "the fused one is TransformerEngine's")
    if release(installed.transformer_engine) < PERMUTE_FUSION_VERSION:
        return Choice("unfused", f"the fused one needs transformer-engine {dotted(PERMUTE_FUSION_VERSION)}")
    return Choice("fused", "TransformerEngine's")


def _dispatcher(installed: Installed, wanted: Wanted) -> Choice:
    if not wanted.experts:
        return Choice("alltoall", "the model has no experts")
    if wanted.dispatcher != "auto":
        _check_dispatcher(installed, wanted)
        return Choice(wanted.dispatcher, f"{wanted.names.key('moe.dispatcher')}={wanted.dispatcher}")
    if wanted.gpus_per_node is None or wanted.expert_ranks <= wanted.gpus_per_node:
        return Choice("alltoall", "all experts are on one node")
    if not installed.cuda:
        return Choice("alltoall", "deepep needs a CUDA device")
    if not installed.deep_ep:
        return Choice("alltoall", "experts are spread over nodes, but deep_ep is not installed, or is none of DeepEP 1")
    return Choice("deepep", "experts are spread over nodes, and deep_ep is installed")


def _check_dispatcher(installed: Installed, wanted: Wanted) -> None:
    problem = None
    if wanted.dispatcher == "allgather" and wanted.ep > 1:
        problem = (
            "gathers rows of equal length, but packed rows differ between the ranks of "
            f"{wanted.names.key('parallel.ep')}={wanted.ep}; set it to alltoall"
        )
    elif wanted.dispatcher == "allgather" and wanted.pp > 1:
        problem = "is refused by megatron where pipeline stages exchange rows of any length; set it to alltoall"
    elif wanted.dispatcher == "deepep" and not installed.cuda:
        problem = "needs a CUDA device; set it to auto or alltoall"
    elif wanted.dispatcher == "deepep" and not installed.deep_ep:
        problem = "needs the package deep_ep of DeepEP 1; set it to auto or alltoall"
    elif wanted.dispatcher == "deepep" and wanted.tp * wanted.ep == 1:
        problem = f"needs {wanted.names.key('parallel.ep')} > 1 (or tp > 1); set it to auto or alltoall"
    if problem:
        raise ConfigError(f"{wanted.names.key('moe.dispatcher')}={wanted.dispatcher} {problem}")


def _fp8(installed: Installed, engine: bool, wanted: Wanted) -> Choice:
    key = f"{wanted.names.key('fp8')}={wanted.fp8}"
    if wanted.fp8 != "none":
        require_recipe(wanted.fp8, installed, engine=engine, names=wanted.names)
    return Choice(wanted.fp8, key)


def _gradient_accumulation(installed: Installed) -> Choice:
    if not installed.cuda:
        return Choice("unfused", "the fused one needs a CUDA device")
    if not installed.gradient_fusion:
        # TransformerEngine has one of its own, but megatron's output projection refuses without apex's (0.16.1).
        return Choice("unfused", "NVIDIA apex with fused_weight_gradient_mlp_cuda is not installed")
    return Choice("fused", "apex is installed")
