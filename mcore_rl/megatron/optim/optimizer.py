"""Megatron's data parallelism and optimizer, configured so that gradients are plain sums over tokens and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.config.models import ActorConfig, OptimizerSettings
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import TrainerConfig
from mcore_rl.errors import ConfigError
from mcore_rl.megatron.lora.adapters import has_adapters
from mcore_rl.megatron.model.output import ModelChunk, output_weight, unwrap
from mcore_rl.megatron.model.shards import local_shard, replicas_of, shard_parameters
from mcore_rl.megatron.optim.host_optimizer import HostOptimizer, gradients_released
from mcore_rl.megatron.optim.loss_scale import LossScaler, share_scaler
from mcore_rl.megatron.optim.main_params import optimizer_parts
from mcore_rl.megatron.optim.sharded_parallel import ShardedDataParallel

Item = TypeVar("Item")
_FLOAT32_BUFFERS = (".expert_bias", "inv_freq")
BUCKET_PARAMETERS: int | None = None
"""Parameters per gradient bucket with overlapped reduction; None: Megatron's default."""


DataParallel: TypeAlias = DistributedDataParallel | ShardedDataParallel
"""A wrapped chunk: with whole parameters, or with shards of them (ActorConfig.shards_parameters)."""


def broadcast_parameters(chunks: list[ModelChunk]) -> None:
    """Copy the parameters of the first data-parallel rank to its replicas, except sharded parameters, which are copied
    when they are built (model/rows.py).

    Collective: all ranks.
    """
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        if local_shard(parameter) is None:
            dist.broadcast(parameter.data, group_src=0, group=replicas_of(parameter))


def wrap_chunks(chunks: list[ModelChunk], actor: ActorConfig) -> list[DataParallel]:
    """Wrap every chunk in Float16Module (for 16-bit dtypes) and in DistributedDataParallel or ShardedDataParallel.
    Gradients are float32, accumulate over micro-batches, and are summed, not averaged, over data-parallel ranks. With
    sharded parameters the adapters of a LoRA run are replicated, and the frozen weights are sharded.

    With actor.overlap_param_gather, parameters are complete only after `gather_parameters` or within a forward pass.

    Collective: all ranks.
    """
    config = chunks[0].config
    # Otherwise DDP, which reads this in its constructor, would divide gradients by the data-parallel size, and
    # Megatron's schedules would divide losses by the number of micro-batches.
    assert config.calculate_per_token_loss
    config.finalize_model_grads_func = sum_gradients
    modules = _in_model_dtype(chunks)
    if actor.shards_parameters and not has_adapters(chunks):
        return [ShardedDataParallel(config, module) for module in modules]
    if actor.shards_parameters:
        # Only adapters are trained, which every data-parallel rank has whole.
        for chunk in chunks:
            shard_parameters(chunk)
    wrapped = _replicate(modules, config, actor)
    _set_sync_functions(wrapped, config)
    return [*wrapped]


def wrap_frozen(chunks: list[ModelChunk], section: ActorConfig) -> list[torch.nn.Module]:
    """Wrap chunks that are not trained in Float16Module (for 16-bit dtypes), and in ShardedDataParallel if their
    parameters are sharded.

    Collective: all ranks.
    """
    modules = _in_model_dtype(chunks)
    if section.shards_parameters:
        return [ShardedDataParallel(chunks[0].config, module) for module in modules]
    return [*modules]


def _in_model_dtype(chunks: list[ModelChunk]) -> list[ModelChunk | Float16Module]:
    return [chunk if chunk.config.params_dtype == torch.float32 else in_16_bits(chunk) for chunk in chunks]


def _replicate(
    modules: Sequence[torch.nn.Module], config: TransformerConfig, actor: ActorConfig
) -> list[DistributedDataParallel]:
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=actor.distributed_optimizer,
        overlap_grad_reduce=actor.overlap_grad_reduce,
        overlap_param_gather=actor.overlap_param_gather,
        # Only the interleaved schedule starts parameter gathers of all stages together.
        align_param_gather=actor.overlap_param_gather and len(modules) > 1,
        bucket_size=BUCKET_PARAMETERS,
    )
    return [
        # Like Megatron's own training: the communication of later chunks overlaps with computation without buckets.
        DistributedDataParallel(config, settings, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]


def _set_sync_functions(chunks: list[DistributedDataParallel], config: TransformerConfig) -> None:
    """Set the functions with which Megatron's schedules delay and start overlapped communication, as Megatron's own
    training loop does."""
    settings = chunks[0].ddp_config
    if settings.overlap_grad_reduce:
        config.no_sync_func = _single_or_list([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _single_or_list([chunk.start_grad_sync for chunk in chunks])
    if settings.overlap_param_gather:
        if settings.align_param_gather:
            config.param_sync_func = [chunk.start_param_sync for chunk in chunks]
        for chunk in chunks:
            if unwrap(chunk).post_process and output_weight(chunk).requires_grad:
                _gather_output_weight(chunk)


def _single_or_list(functions: list[Item]) -> Item | list[Item]:
    """Return the form that the schedules expect: a function for one chunk, a list for several."""
    return functions[0] if len(functions) == 1 else functions


def _gather_output_weight(chunk: DistributedDataParallel) -> None:
    """Wait for the gather of the output projection after the decoder's forward pass. Megatron's hook for this is on the
    module, which is never called, because the loss uses its weight directly."""
    group = chunk.param_to_bucket_group[output_weight(chunk)]
    skip_next = chunk.ddp_config.align_param_gather
    unwrap(chunk).decoder.register_forward_hook(lambda *_: group.finish_param_sync(skip_next_bucket_dispatch=skip_next))


def gather_parameters(chunks: Sequence[DataParallel]) -> None:
    """Complete all parameters after an optimizer step with overlapped gathers; otherwise do nothing.

    Collective: all ranks.
    """
    for group in _overlapped_groups(chunks):
        if not _is_gathered(group):
            group.start_param_sync(force_sync=True)


def parameters_are_gathered(chunks: Sequence[DataParallel]) -> bool:
    """Return whether every parameter, or this rank's shard of it, is up to date. Not collective."""
    return all(_is_gathered(group) for group in _overlapped_groups(chunks))


def release_gradients(chunks: Sequence[DataParallel]) -> None:
    """Free the gradients of sharded parameters after an update; buffers of DistributedDataParallel keep their memory.
    Not collective."""
    for chunk in chunks:
        if isinstance(chunk, ShardedDataParallel):
            chunk.zero_grad_buffer()


def _overlapped_groups(chunks: Sequence[DataParallel]) -> Iterator[_ParamAndGradBucketGroup]:
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            yield from (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)


def _is_gathered(group: _ParamAndGradBucketGroup) -> bool:
    return group.param_gather_dispatched and group.param_gather_handle is None


def in_16_bits(chunk: ModelChunk) -> Float16Module:
    """Wrap in Float16Module without rounding the router's expert bias and the rotary frequencies of transformers.
    Float16Module also rounds buffers; megatron-core 0.16.1 restores the bias's dtype in the next forward pass, but not
    its precision."""
    kept = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith(_FLOAT32_BUFFERS)}
    wrapped = Float16Module(chunk.config, chunk)
    for name, buffer in kept.items():
        owner, _, attribute = name.rpartition(".")
        setattr(chunk.get_submodule(owner), attribute, buffer)
    return wrapped


def sum_gradients(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options: object) -> None:
    """Reduce gradients over data-, tensor- and pipeline-parallel ranks with Megatron's function, but without dividing
    by the number of tokens: the loss already contains its weights."""
    del num_tokens
    finalize_model_grads(model, None, **options)


def build_optimizer(
    chunks: list[DataParallel], settings: OptimizerSettings, scaler: LossScaler | None = None
) -> MegatronOptimizer:
    """Build AdamW, sharded over data-parallel ranks if the chunks are wrapped for the distributed optimizer or have
    sharded parameters, with float32 main parameters for 16-bit models. With settings.cpu_offload its state is in host
    memory (host_optimizer.py). `scaler` scales the loss of float16 models, which need one.

    Collective: all ranks. Call it after the weights are loaded, because it copies them.
    """
    config = chunks[0].config
    sharded = isinstance(chunks[0], ShardedDataParallel)
    chosen = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        # Shards are float32 and need no main parameters.
        bf16=config.bf16 and not sharded,
        # Megatron's only optimizer that scales the loss of float32 shards is the one for float16.
        fp16=config.fp16,
        params_dtype=torch.float32 if sharded else config.params_dtype,
        use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
    )
    optimizer = _new_optimizer(chosen, chunks, offloads=settings.cpu_offload and not sharded)
    if sharded:
        # Every rank has other shards, so the gradient norm is a sum over all ranks, like the distributed optimizer's.
        # Megatron adds only the model-parallel ranks of an optimizer for whole parameters.
        for part in optimizer_parts(optimizer):
            part.grad_stats_parallel_group = parallel_state.get_intra_distributed_optimizer_instance_group()
    if scaler is not None:
        share_scaler(optimizer, scaler)
        config.grad_scale_func = scaler.scale_loss
    return optimizer


def _new_optimizer(chosen: OptimizerConfig, chunks: list[DataParallel], *, offloads: bool) -> MegatronOptimizer:
    if not offloads:
        return get_megatron_optimizer(chosen, chunks)
    with gradients_released(chunks):
        optimizer = get_megatron_optimizer(chosen, chunks)
        for part in optimizer_parts(optimizer):
            HostOptimizer(part)
    return optimizer


def build_scheduler(optimizer: MegatronOptimizer, role: ModelRole, num_updates: int) -> OptimizerParamScheduler:
    """Build the learning-rate schedule of a run with `num_updates` updates.

    Update k = 1, 2, ... has the rate lr k / (warmup + 1) up to lr at update warmup + 1, then a constant or decaying
    rate that would reach min_lr at update decay_steps + 1. No update has rate 0.

    Raises: ConfigError that names the key.
    """
    settings, key = role.section.optimizer, role.key("optimizer")
    if not 0 <= settings.min_lr <= settings.lr:
        raise ConfigError(f"{key}.min_lr={settings.min_lr} must be between 0 and {key}.lr={settings.lr}")
    warmup = settings.warmup_steps
    decay = settings.decay_steps if settings.decay_steps is not None else num_updates
    if settings.schedule == "constant":
        decay = max(decay, warmup + 1)
    elif warmup >= decay:
        raise ConfigError(f"{key}.warmup_steps={warmup} must be less than {key}.decay_steps ({decay} updates)")
    return OptimizerParamScheduler(
        optimizer,
        # Megatron's rate grows linearly from init_lr at update 1 to max_lr at update warmup + 1.
        init_lr=settings.lr / (warmup + 1) if warmup else settings.lr,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        # A resumed run uses its configuration; only the number of completed updates comes from the checkpoint.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def updates_of_run(trainer: TrainerConfig) -> int:
    """Return the total number of optimizer updates of the policy in the run."""
    return trainer.steps * max(trainer.prompts_per_step // trainer.prompts_per_update, 1) * trainer.update_epochs
