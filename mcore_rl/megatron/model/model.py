"""Construction of this rank's model chunks from an HF configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mcore_rl.config.models import ModelConfig, ParallelConfig
from mcore_rl.config.schema import resolved_dtype
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.model.attention.packed import mark_sinks
from mcore_rl.megatron.model.attention.rotation_by_layer import rotate_windows
from mcore_rl.megatron.model.expert_rounding import round_experts
from mcore_rl.megatron.model.layer_specs import LOCAL, LayerKind, decoder_specs, finish_latent_attention, mtp_specs
from mcore_rl.megatron.model.output import ModelChunk, PolicyModel
from mcore_rl.megatron.model.rotation import scale_rotation, set_frequencies
from mcore_rl.megatron.model.rows import keep_rows, use_row_layers
from mcore_rl.megatron.model.shards import separate_experts
from mcore_rl.megatron.model.stored_chunks import stored_chunks
from mcore_rl.megatron.model.value_model import ValueModel
from mcore_rl.megatron.model.vision.model import VisionPolicy, set_trained
from mcore_rl.megatron.model.vision.tower import build_tower
from mcore_rl.resolved.implementation import Implementation
from mcore_rl.resolved.installed import Installed, here
from mcore_rl.resolved.layout import sequence_parallel
from mcore_rl.resolved.model import ResolvedModel
from mcore_rl.resolved.recompute import recompute_arguments
from model_converters.dcp.blocks import CheckpointChunk
from model_converters.families.parts.arguments import OWN_ARGUMENTS, ModelArguments
from model_converters.mapping.layout import TrainLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
}


def build_model(
    spec: ResolvedModel,
    *,
    gpus_per_node: int | None = None,
    kind: type[PolicyModel] = PolicyModel,
    installed: Installed | None = None,
) -> list[ModelChunk]:
    """Build this rank's chunks, one per virtual pipeline stage, in the order that forward_backward_func expects.

    Weights are initialized only if random_init of the role's model is set (Megatron's random streams make this
    reproducible for one layout). Otherwise they are undefined until `loading.load_hf` or a checkpoint fills them.

    With sharded parameters, this rank keeps rows of them (rows.py).

    gpus_per_node: used to detect expert parallelism across nodes; None: experts stay within a node.
    kind: class of the chunks.
    installed: available libraries and device; None: detect them in this process.

    Raises: ConfigError for a dtype, recompute mode or model that cannot be built.
    Collective: all ranks, after parallel.initialize.
    """
    implementation = spec.implementation(gpus_per_node, installed or here())
    config = _transformer_config(spec, implementation)
    layers = LayerKind(implementation.transformer_engine, implementation.own_attention)
    if spec.layout.hf_tensors:
        return [_transformers_model(spec, config, kind)]
    if config.normalization != "RMSNorm" and not layers.engine:
        raise ConfigError(f"normalization {config.normalization} needs TransformerEngine ({spec.role.checkpoint})")
    stages = [None] if spec.layout.vpp is None else range(spec.layout.vpp)
    sharded = spec.role.section.parallel.shard_parameters
    chunks = [_build_chunk(kind, config, spec.arguments, layers, stage, sharded=sharded) for stage in stages]
    set_trained(chunks, spec.role.section.train_vision)
    if spec.role.section.quantization_aware:
        for chunk in chunks:
            round_experts(chunk.decoder.layers, spec.role.section.quantization_aware)
    return chunks


def _transformers_model(spec: ResolvedModel, config: TransformerConfig, kind: type[PolicyModel]) -> ModelChunk:
    """Build transformers' model. Its checkpoints have the format of Megatron's model, which is built without memory."""
    # Imported here: loading transformers takes seconds.
    from mcore_rl.megatron.huggingface.model import TransformersModel

    def stored() -> list[CheckpointChunk]:
        uninitialized = replace(spec, role=replace(spec.role, model=replace(spec.role.model, random_init=False)))
        with torch.device("meta"):
            local = _transformer_config(uninitialized, uninitialized.implementation(None, Installed()))
            return stored_chunks(_build_chunk(kind, local, spec.arguments, LOCAL, vp_stage=None, sharded=False))

    model = TransformersModel(config, spec, stored, predicts_values=issubclass(kind, ValueModel))
    if spec.role.section.quantization_aware:
        round_experts(model.layers(), spec.role.section.quantization_aware)
    _move_to_device(model)
    # The planner builds models on the meta device, and reads whole parameters.
    if torch.get_default_device().type != "meta":
        keep_rows(model, initialized=spec.role.model.random_init)
    return model


def _transformer_config(spec: ResolvedModel, implementation: Implementation) -> TransformerConfig:
    """Build Megatron's configuration: architecture, parallelism, and the options that the actor relies on."""
    given: dict[str, object] = dict(spec.arguments.transformer)
    given["activation_func"] = _ACTIVATIONS[spec.arguments.transformer["activation_func"]]
    # With 0 instead of None, Megatron would still look for MTP layers.
    given["mtp_num_layers"] = spec.arguments.mtp_num_layers or None
    kind = MLATransformerConfig if given.get("multi_latent_attention") else TransformerConfig
    later = {name: given.pop(name) for name in _SET_AFTER_CHECKS & given.keys()}
    unknown = set(given) - {f.name for f in fields(kind)}
    assert not unknown, f"{kind.__name__} has no {sorted(unknown)}"
    given |= _parallel_arguments(spec.layout, spec.role.section.parallel)
    given |= _numeric_arguments(spec.role.model)
    given |= implementation.arguments()
    given |= recompute_arguments(spec, implementation)
    # megatron-core 0.16.1: the fused gate clamps before it adds the bias, and supports no clamp with SiLU.
    given["bias_activation_fusion"] = given["activation_func"] is F.silu and "activation_func_clamp_value" not in given
    if given.get("num_moe_experts") and given.get("add_bias_linear"):
        # megatron-core 0.16.1: TransformerEngine's grouped experts reject it.
        given["bias_dropout_fusion"] = False
    if given.get("num_moe_experts"):
        given |= _EXPERT_ARGUMENTS
    if not spec.role.model.random_init:
        given |= _SKIP_INITIALIZATION
    config = kind(**given)
    vars(config).update(later)
    return config


_SET_AFTER_CHECKS = {"moe_router_enable_expert_bias", *OWN_ARGUMENTS}
"""Arguments that the constructor of TransformerConfig does not take: this project's own, and the correction bias, which
megatron-core 0.16.1 rejects with softmax scores. PolicyRouter supports both."""


def _parallel_arguments(layout: TrainLayout, parallel: ParallelConfig) -> dict[str, object]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "pipeline_model_parallel_layout": layout.pipeline_layout,
        # Required by mixture-of-experts layers with tp > 1; reduces activation memory of dense layers.
        "sequence_parallel": sequence_parallel(parallel, layout.tp),
        # Packed micro-batches differ in length, so stages exchange shapes before tensors.
        "variable_seq_lengths": layout.pp > 1,
        # megatron-core 0.16.1 on gloo: the interleaved schedule without overlap gives wrong results at pp=2 without
        # an error, and with deallocated outputs it has a race.
        "overlap_p2p_comm": layout.vpp is not None,
        "batch_p2p_comm": layout.vpp is None,
        "deallocate_pipeline_outputs": False,
    }


def _numeric_arguments(model_config: ModelConfig) -> dict[str, object]:
    dtype = DTYPES[resolved_dtype(model_config.dtype, cuda=torch.cuda.is_available())]
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        # The loss is a sum over tokens. DDP reads this when it is built; otherwise gradients are scaled by 1 / dp.
        "calculate_per_token_loss": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        # Otherwise Megatron allocates weights on the current device, even if torch's default device is meta.
        "use_cpu_initialization": torch.get_default_device().type == "meta",
    }


_EXPERT_ARGUMENTS = {
    # PolicyRouter computes the auxiliary losses and updates the expert bias itself.
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
    # 16-bit logits cause ties and unstable top-k choices. Engines route in float32 with model.float32_router.
    "moe_router_dtype": "fp32",
}


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_INITIALIZERS = ("init_method", "output_layer_init_method", "embedding_init_method")
_SKIP_INITIALIZATION = dict.fromkeys(_INITIALIZERS, _unchanged)
"""Initializers that leave weights unchanged.

perform_initialization=False is not used: in megatron-core 0.16.1 it also skips the attributes that mark tensor-parallel
weights, and gradient norms would then count only the shards of rank 0.
"""


def _build_chunk(
    kind: type[PolicyModel],
    config: TransformerConfig,
    arguments: ModelArguments,
    layers: LayerKind,
    vp_stage: int | None,
    *,
    sharded: bool,
) -> PolicyModel:
    tp = config.tensor_model_parallel_size
    if arguments.vision is not None:
        assert kind is PolicyModel, "resolved.vision rejects other models with a tower"
        kind = VisionPolicy
    scale_rotation(config, arguments.rotary)
    spec = decoder_specs(config, layers, vp_stage)
    initialized = config.init_method is not _unchanged
    if sharded:
        use_row_layers(spec.layer_specs, initialized=initialized)
    model = kind(
        config,
        spec,
        # Megatron's shards of the vocabulary have equal sizes. The loss ignores the padding (unpadded_vocab_size).
        vocab_size=-(-arguments.vocab_size // tp) * tp,
        max_sequence_length=arguments.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=arguments.tied_embeddings,
        position_embedding_type="rope" if arguments.vision is None else "mrope",
        rotary_percent=arguments.rotary.fraction,
        rotary_base=arguments.rotary.base,
        mtp_block_spec=mtp_specs(config, spec, layers, vp_stage),
        vp_stage=vp_stage,
    )
    model.unpadded_vocab_size = arguments.vocab_size
    set_frequencies(model, arguments.rotary)
    if isinstance(model, VisionPolicy) and model.pre_process:
        assert arguments.vision is not None
        tower = build_tower(arguments.vision, config, initialized=initialized)
        model.add_tower(tower, arguments.vision.deepstack)
    for module in model.modules():
        if isinstance(module, MultiLatentAttention):
            finish_latent_attention(module, config, arguments.latent_norm_epsilon)
        if isinstance(module, MoELayer):
            separate_experts(module)
        mark_sinks(module)
    if arguments.window_rotary is not None:
        rotate_windows(model, arguments.rotary, arguments.window_rotary)
    if model.pre_process and "embedding_scale" in arguments.transformer:
        _scale_embeddings(model, arguments.transformer["embedding_scale"])
    _move_to_device(model)
    if sharded:
        keep_rows(model, initialized=initialized)
    return model


def _scale_embeddings(model: PolicyModel, scale: float) -> None:
    """Multiply the embeddings by `scale`, which transformers rounds to their dtype first."""
    rounded = float(torch.tensor(scale, dtype=model.config.params_dtype, device="cpu"))
    model.embedding.register_forward_hook(lambda module, args, embedded: embedded * rounded)


def _move_to_device(model: torch.nn.Module) -> None:
    """Move a model to this rank's GPU, if there is one, except tensors on meta."""
    if torch.cuda.is_available():
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.cuda())
