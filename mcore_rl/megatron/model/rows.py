"""Construction of models with sharded parameters, with memory for one whole layer at a time.

A layer is built whole, because Megatron's initializers draw the random numbers of whole parameters. Directly after its
constructor this rank keeps its rows of every parameter (shards.py), and a meta tensor with the same shape and
attributes takes the parameter's place. The rest of the model (embedding, final norm, output projection) follows when
the model is complete: a pass gathers it whole too. A model of transformers is built on the meta device, without memory,
or whole if its weights are initialized. Weights are then loaded into the rows, and `shard_parameters` moves the rows
into the memory of FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from mcore_rl.megatron.model.post_norms import PostNormLayer
from mcore_rl.megatron.model.shards import Shard, local_shard, replicas_of, separate_experts
from model_converters.mapping.placement import chunk_range


class _KeepsRows:
    """First base class of a layer that keeps this rank's rows of its parameters; see keep_rows."""

    def __init__(self, *args: object, initialized: bool, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # Before the rows are cut: the marks decide which ranks divide a parameter.
        assert isinstance(self, TransformerLayer)
        if isinstance(self.mlp, MoELayer):
            separate_experts(self.mlp)
        if torch.cuda.is_available():
            self.cuda()
        keep_rows(self, initialized=initialized)


class RowLayer(_KeepsRows, TransformerLayer):
    """Megatron's layer, with rows."""


class RowPostNormLayer(_KeepsRows, PostNormLayer):
    """Layer with post norms, with rows."""


_ROW_LAYERS = {kept: kept for kept in (RowLayer, RowPostNormLayer)} | {
    TransformerLayer: RowLayer,
    PostNormLayer: RowPostNormLayer,
}


def use_row_layers(layer_specs: Sequence[ModuleSpec], *, initialized: bool) -> None:
    """Set classes that keep rows as the classes of the layers in their specs."""
    for layer in layer_specs:
        layer.module, layer.params = _ROW_LAYERS[layer.module], {**layer.params, "initialized": initialized}


@torch.no_grad()
def keep_rows(module: torch.nn.Module, *, initialized: bool) -> None:
    """Replace every parameter that is still whole by a meta tensor, and keep this rank's rows of it as its
    `local_shard`. If weights are initialized, all ranks get rows of the first data-parallel rank's values. A parameter
    that is on the meta device already has no values; its rows get memory on this rank's device.

    Collective: all ranks, if `initialized`.
    """
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if local_shard(parameter) is not None:
                continue
            if initialized:
                dist.broadcast(parameter.data, group_src=0, group=replicas_of(parameter))
            stand_in = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            vars(stand_in).update(vars(parameter))
            stand_in.local_shard = _rows(parameter)  # type: ignore[attr-defined]
            owner.register_parameter(name, stand_in)


def _rows(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    first, end = rows_of(parameter)
    values = parameter.data[first:end]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.empty_like(values, device=device) if values.is_meta else values.clone()
    rows = torch.nn.Parameter(values, parameter.requires_grad)
    start = first * parameter.shape[1:].numel()
    rows.shard = Shard(parameter.shape, start, parameter.dtype)  # type: ignore[attr-defined]
    return rows


def rows_of(parameter: torch.Tensor) -> tuple[int, int]:
    """Return the rows [first, end) that this rank keeps of a parameter."""
    group = replicas_of(parameter)
    return chunk_range(parameter.shape[0], group.rank(), group.size())


@torch.no_grad()
def fill_parameter(parameter: torch.nn.Parameter, fill: Callable[[torch.Tensor], object]) -> None:
    """Call `fill` with the parameter, or, if this rank keeps rows of it, with a whole tensor from which it copies
    them. `fill` must give the same values on all data-parallel ranks."""
    rows = local_shard(parameter)
    if rows is None:
        fill(parameter)
        return
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=rows.device)
    fill(whole)
    rows.copy_(whole[slice(*rows_of(parameter))])
