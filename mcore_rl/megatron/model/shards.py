"""Parameters sharded over data-parallel ranks (parallel.shard_parameters): torch's FSDP2 on a Megatron model.

A rank stores rows of every tensor, by the rule of torch.chunk: rank r of d has rows [r c, (r + 1) c) with c = ceil(rows
/ d), so the last ranks may have fewer rows or none. A layer gathers its parameters before its forward and backward
pass, and reduce-scatters their gradients after each backward pass. The rest of the model (embedding, final norm, output
projection) is gathered from the start of a forward pass to the end of the backward pass or, without one, to `reshard`,
because the loss uses the output projection after the forward pass (output.py).

Experts that other ranks do not hold (marked with allreduce=False) are divided over the expert-data-parallel ranks, all
other parameters over the data- and context-parallel ranks.

The shards of a 16-bit model that is trained are float32: they are the optimizer's main parameters, and a layer gathers
them in 16 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mcore_rl.megatron.model.output import ModelChunk
from model_converters.mapping.placement import chunk_range


@dataclass(frozen=True)
class Shard:
    """Position of a shard in a parameter of this tensor-parallel rank.

    shape: shape of the parameter. start: index of the shard's first element in the flattened parameter. dtype: dtype in
    which layers use the parameter and checkpoints store it.
    """

    shape: torch.Size
    start: int
    dtype: torch.dtype

    @property
    def first_row(self) -> int:
        """Index along dim 0 of the shard's first row."""
        return self.start // self.shape[1:].numel()


def replicas_of(parameter: torch.Tensor) -> dist.ProcessGroup:
    """Return the data-parallel group of a parameter. Megatron marks expert parameters with allreduce=False: their
    replicas form another group."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def separate_experts(layer: MoELayer) -> None:
    """Mark the experts of a layer as parameters with their own replicas where megatron-core 0.16.1 does not.

    It treats expert gradients separately only if ep > 1. With etp != tp it would sum them over the ranks that replicate
    dense weights, but these hold different shards of the experts.

    It marks the bias of an expert's second projection like the bias of a dense one: replicated over the tensor-parallel
    ranks, each with a part of the tokens. But these ranks hold other experts, or replicas whose gradients are summed
    with the weights'. The gradient would be summed twice, and its norm counted on the first rank only (Megatron-LM
    issue 6099).
    """
    if layer.config.expert_tensor_parallel_size != layer.config.tensor_model_parallel_size:
        for parameter in layer.experts.parameters():
            parameter.allreduce = False
    if layer.config.add_bias_linear:
        assert layer.config.expert_tensor_parallel_size == 1, "TransformerConfig requires it for experts with biases"
        for name, parameter in layer.experts.named_parameters():
            if re.search(r"linear_fc2\.bias\d*$", name):
                parameter.sequence_parallel = False
                parameter.tensor_model_parallel = True


def shard_parameters(model: ModelChunk) -> None:
    """Shard the parameters of a chunk over the data-parallel ranks, layer by layer. Its parameters are meta tensors of
    which this rank keeps rows (rows.py). Others, the adapters of a LoRA run, stay whole on every rank.

    Collective: all ranks.
    """
    # fully_shard creates new parameters without the attributes that Megatron sets (pytorch issue 136929). Gradient
    # norms and sums over tensor-parallel ranks would be wrong without them.
    whole = {parameter for parameter in model.parameters() if local_shard(parameter) is None}
    marks = {name: vars(parameter) for name, parameter in model.named_parameters() if parameter not in whole}
    for layer in model.layers():
        experts = getattr(layer.mlp, "experts", None)
        # Before their layer, which would otherwise sum them with other experts.
        if experts is not None and not getattr(next(experts.parameters()), "allreduce", True):
            _shard_module(experts, model, whole)
        _shard_module(layer, model, whole)
    _shard_module(model, model, whole)
    for name, mark in marks.items():
        parameter = model.get_parameter(name)
        vars(parameter).update(mark)
        parameter.local_shard = _plain_shard(parameter, model.config.params_dtype)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss contains the denominator, so gradients are sums. gloo supports no other factor.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _shard_module(module: torch.nn.Module, model: ModelChunk, whole: set[torch.nn.Parameter]) -> None:
    """Shard the parameters of a module that are not sharded yet, as one group, except the parameters in `whole`."""
    remaining = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter not in whole and not isinstance(parameter, DTensor)
    ]
    groups = {id(group): group for group in (replicas_of(parameter) for _, _, parameter in remaining)}
    assert len(groups) == 1, "parameters of one module have different replicas"
    for _, _, parameter in remaining:
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    low = None if model.config.params_dtype == torch.float32 else model.config.params_dtype
    fully_shard(
        module,
        ignored_params=whole,
        mesh=DeviceMesh.from_group(next(iter(groups.values())), device),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=low,
            reduce_dtype=torch.float32 if low else None,
            # Megatron chooses the dtype of activations; some of a 16-bit model are float32.
            cast_forward_inputs=False,
        ),
    )
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    with torch.no_grad():
        for owner, name, former in remaining:
            # Not kept any longer, so that a rank never has both forms of all its rows.
            rows = vars(former).pop("local_shard")
            local_part(owner.get_parameter(name)).copy_(rows.to(model.config.params_dtype))


def reshard(module: torch.nn.Module) -> None:
    """Free gathered parameters after a pass; does nothing for a model that is not sharded. Not collective."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this rank stores, sharing its memory: a shard, or the whole tensor."""
    return tensor.data.to_local() if isinstance(tensor, DTensor) else tensor.data


def local_shard(parameter: torch.Tensor) -> torch.nn.Parameter | None:
    """Return this rank's shard of a parameter as a plain parameter with the attributes that Megatron sets and `shard`,
    its position; None if the parameter is not sharded. They share memory.

    Shapes: [rows, ...] -> [rows of this rank, ...].
    """
    return getattr(parameter, "local_shard", None)


def _plain_shard(parameter: torch.Tensor, dtype: torch.dtype) -> torch.nn.Parameter:
    assert isinstance(parameter, DTensor)
    local = torch.nn.Parameter(local_part(parameter), requires_grad=parameter.requires_grad)
    vars(local).update(vars(parameter))
    group = replicas_of(parameter)
    first, end = chunk_range(parameter.shape[0], group.rank(), group.size())
    assert len(local) == end - first, "torch divides rows by another rule than chunk_range"
    local.shard = Shard(parameter.shape, first * parameter.shape[1:].numel(), dtype)  # type: ignore[attr-defined]
    return local


def shard_of(parameter: torch.Tensor) -> Shard | None:
    """Return the position of a shard from `local_shard`; None for other tensors."""
    return getattr(parameter, "shard", None)


@contextmanager
def stand_ins(model: ModelChunk) -> Iterator[dict[int, torch.nn.Parameter]]:
    """Return a context in which meta tensors replace the sharded parameters, with their whole shapes and attributes, so
    that Megatron describes the model as if it were not sharded. Yields the shards by id of their meta tensor."""
    owners = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    ]
    shards = {}
    try:
        for module, name, parameter in owners:
            shard = local_shard(parameter)
            assert shard is not None
            whole = torch.empty(parameter.shape, dtype=shard_dtype(shard), device="meta")
            stand_in = torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)
            vars(stand_in).update(vars(parameter))
            shards[id(stand_in)] = shard
            module.register_parameter(name, stand_in)
        yield shards
    finally:
        for module, name, parameter in owners:
            module.register_parameter(name, parameter)


def shard_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which layers use a tensor of this rank; a trained shard itself is float32."""
    shard = shard_of(tensor)
    return tensor.dtype if shard is None or not tensor.requires_grad else shard.dtype
