"""Parallel layout of the trainer ranks, checked against the model. Does not import megatron.core, so that the driver
can use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from mcore_rl.config.models import FSDP2, MoeConfig, ParallelConfig
from mcore_rl.config.roles import POLICY, KeyNames, ModelRole
from mcore_rl.config.rules.validation import check_ranks_divide
from mcore_rl.errors import ConfigError
from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.families.parts.family import ModelArguments, TransformerArguments
from model_converters.families.parts.hf_config import HFConfig
from model_converters.mapping.layout import TrainLayout


@contextmanager
def conversion_errors(prefix: str, remedy: str = "") -> Iterator[None]:
    """Raise ConfigError for a ConversionError of the block, with its message on one line between prefix and remedy."""
    try:
        yield
    except ConversionError as error:
        raise ConfigError(f"{prefix}{' '.join(str(error).split())}{remedy}") from error


def model_arguments(hf_config: HFConfig, key: str = POLICY.checkpoint) -> ModelArguments:
    """Return the model's sizes and settings from its family; `key` names the model's directory in errors.

    Raises: ConfigError for a model_type or a setting in config.json that no family supports.
    """
    with conversion_errors(f"{key}: "):
        return family_for(hf_config).model_arguments(hf_config)


def check_experts(moe: MoeConfig, sizes: TransformerArguments, names: KeyNames = POLICY) -> None:
    """Reject settings of experts that the model does not have. `sizes` is ModelArguments.transformer.

    Raises: ConfigError naming the `moe` key.
    """
    unused = {name: getattr(moe, name) for name in ("aux_loss_coefficient", "z_loss_coefficient", "bias_update_rate")}
    unused["router_replay"] = moe.router_replay if moe.router_replay != "none" else 0
    lacks = "experts"
    if sizes.get("num_moe_experts"):
        lacks = "correction bias in its routers"
        biased = sizes.get("moe_router_enable_expert_bias")
        unused = {} if biased else {"bias_update_rate": moe.bias_update_rate}
    for name, value in unused.items():
        if value:
            default = "none" if name == "router_replay" else 0
            key = names.key(f"moe.{name}")
            raise ConfigError(f"{key}={value}, but the model has no {lacks}; set it to {default}")


def role_layout(role: ModelRole, world_size: int, hf_config: HFConfig) -> TrainLayout:
    """Return the layout of a role's ranks, checked against the model: train_layout and the strategy.

    Raises: ConfigError naming the key that does not fit.
    """
    layout = train_layout(role.section.parallel, world_size, hf_config, role)
    if role.section.strategy != FSDP2:
        return layout
    _check_expert_layers(role, hf_config)
    sizes = model_arguments(hf_config, role.checkpoint).transformer
    if sizes.get("num_moe_experts") and sizes.get("add_bias_linear"):
        raise ConfigError(
            f"{role.key('strategy')}={FSDP2} does not support experts with biases ({role.checkpoint}); set "
            f"{role.key('strategy')} to megatron"
        )
    return replace(layout, shard_parameters=True, hf_tensors=True)


def _check_expert_layers(role: ModelRole, hf_config: HFConfig) -> None:
    """Raise ConfigError if transformers' model has experts in other layers than the family's table."""
    key = "moe_layer_freq"
    ours, theirs = (model_arguments(config, role.checkpoint) for config in (hf_config, {**hf_config, key: 1}))
    if ours != theirs:
        raise ConfigError(
            f"{role.key('strategy')}={FSDP2} does not support {key} {hf_config[key]} in {role.checkpoint}'s "
            f"config.json: transformers' model ignores it; set {role.key('strategy')} to megatron"
        )


def train_layout(
    parallel: ParallelConfig, world_size: int, hf_config: HFConfig, names: KeyNames = POLICY
) -> TrainLayout:
    """Return the layout of `world_size` trainer ranks, checked against the model.

    Raises: ConfigError naming the `parallel` key that does not fit.
    """
    arguments = model_arguments(hf_config, names.checkpoint)
    sizes = arguments.transformer
    etp = parallel.etp
    if etp is None:
        whole = parallel.ep > 1 or sizes.get("add_bias_linear")
        etp = 1 if sizes.get("num_moe_experts") and whole else parallel.tp
    # Checked again: the default of etp depends on the model, which validate() does not know.
    check_ranks_divide(parallel, world_size, etp, names)
    _check_tensor_axis(parallel, sizes, names)
    _check_linear_attention(parallel, sizes, names)
    _check_expert_axes(parallel, sizes, etp, names)
    _check_sequence_parallel(parallel, sizes, names)
    with conversion_errors(f"{names.key('parallel')}."):
        layout = TrainLayout(
            world_size,
            tp=parallel.tp,
            pp=parallel.pp,
            ep=parallel.ep,
            etp=etp,
            cp=parallel.cp,
            # Megatron's interleaved schedule rejects a single chunk per stage.
            vpp=None if parallel.vpp == 1 else parallel.vpp,
            first_stage_layers=parallel.first_stage_layers,
            last_stage_layers=parallel.last_stage_layers,
            pipeline_layout=parallel.pipeline_layout,
            shard_parameters=parallel.shard_parameters,
        )
        layout.stage_layers(sizes["num_layers"])  # called only for its error
    _check_mtp_layers(layout, arguments, names)
    return layout


def sequence_parallel(parallel: ParallelConfig, tp: int) -> bool:
    """Return True if activations between tensor-parallel regions are split along the tokens, over `tp` ranks."""
    return tp > 1 if parallel.sequence_parallel is None else parallel.sequence_parallel


def _check_tensor_axis(parallel: ParallelConfig, sizes: TransformerArguments, names: KeyNames) -> None:
    divided = {"attention heads": sizes["num_attention_heads"]}
    # Without dense layers, ffn_hidden_size is not used.
    if not (sizes.get("num_moe_experts") and all(sizes.get("moe_layer_freq", [1]))):
        divided["units of the feed-forward layer"] = sizes["ffn_hidden_size"]
    if sizes.get("moe_shared_expert_intermediate_size"):
        divided["units of the shared experts"] = sizes["moe_shared_expert_intermediate_size"]
    if sizes.get("linear_attention_freq"):
        # Value heads are a multiple of key heads.
        divided["key heads of linear attention"] = sizes["linear_num_key_heads"]
    if sizes.get("qk_norm_over_heads"):
        # Ranks that share a head would each need its part of the norm's weight.
        divided["key/value heads, over which one norm runs"] = sizes["num_query_groups"]
    for what, count in divided.items():
        if count % parallel.tp:
            raise ConfigError(f"{names.key('parallel.tp')}={parallel.tp} does not divide the model's {count} {what}")
    groups = sizes["num_query_groups"]
    # With more ranks than key-value heads, several ranks hold the same head.
    if groups % parallel.tp and parallel.tp % groups:
        raise ConfigError(
            f"{names.key('parallel.tp')}={parallel.tp} is neither a divisor nor a multiple of the model's "
            f"{groups} key/value heads"
        )


def _check_linear_attention(parallel: ParallelConfig, sizes: TransformerArguments, names: KeyNames) -> None:
    if parallel.cp > 1 and any(sizes.get("linear_attention_freq", [])):
        raise ConfigError(
            f"{names.key('parallel.cp')}={parallel.cp}, but the model has linear attention, whose states megatron does "
            "not pass between context-parallel ranks; set it to 1"
        )


def _check_expert_axes(parallel: ParallelConfig, sizes: TransformerArguments, etp: int, names: KeyNames) -> None:
    experts = sizes.get("num_moe_experts")
    if not experts:
        if parallel.ep != 1:
            raise ConfigError(f"{names.key('parallel.ep')}={parallel.ep}, but the model has no experts; set it to 1")
        if etp != parallel.tp:
            raise ConfigError(f"{names.key('parallel.etp')}={etp}, but the model has no experts; leave it unset")
        return
    if etp > 1 and sizes.get("add_bias_linear"):
        raise ConfigError(
            f"{names.key('parallel.etp')}={etp}: megatron (0.16.1) does not divide experts with biases; set it to 1"
        )
    if experts % parallel.ep:
        raise ConfigError(f"{names.key('parallel.ep')}={parallel.ep} does not divide the model's {experts} experts")
    if sizes["moe_ffn_hidden_size"] % etp:
        raise ConfigError(
            f"{names.key('parallel.etp')}={etp} does not divide the {sizes['moe_ffn_hidden_size']} units of an expert"
        )


def _check_sequence_parallel(parallel: ParallelConfig, sizes: TransformerArguments, names: KeyNames) -> None:
    key = names.key("parallel.sequence_parallel")
    if parallel.sequence_parallel and parallel.tp == 1:
        raise ConfigError(f"{key}=true needs {names.key('parallel.tp')} > 1; leave it unset")
    if parallel.tp == 1 or sequence_parallel(parallel, parallel.tp):
        return
    reason = None
    if sizes.get("multi_latent_attention"):
        reason = "the key part that all heads of latent attention share would get the gradient of one rank's heads only"
    elif sizes.get("num_moe_experts"):
        reason = "megatron trains mixture-of-experts models with tensor parallelism only on split sequences"
    if reason:
        raise ConfigError(f"{key}=false with {names.key('parallel.tp')}={parallel.tp}: {reason}; leave it unset")


def _check_mtp_layers(layout: TrainLayout, arguments: ModelArguments, names: KeyNames) -> None:
    if layout.pipeline_layout is not None and layout.num_mtp_layers != arguments.mtp_num_layers:
        raise ConfigError(
            f"{names.key('parallel.pipeline_layout')}={layout.pipeline_layout} places {layout.num_mtp_layers} "
            f"multi-token-prediction layers (m), but {arguments.mtp_num_layers} are built: the model's own with "
            f"{names.key('mtp_loss_coefficient')} above 0, else none"
        )
