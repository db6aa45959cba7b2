"""Low-rank adapters of frozen projections, y = W x + scale * B (A x): modules, initial values, merging into weights.

| W is sharded by | A | B | communication of tensor-parallel ranks, r numbers per token and module |
|---|---|---|---|
| rows (column-parallel) | replicated | sharded like W | with sequence parallelism A x, otherwise its gradient |
| columns (row-parallel) | sharded like W | replicated | A x, a partial sum on each rank |
| not sharded | replicated | replicated | none |

With sequence parallelism a replicated matrix is applied to the tokens of one rank only, so its gradient must be summed
over the ranks, like the gradient of a norm; its `sequence_parallel` attribute requests this. A projection that fuses
several HF modules has one adapter: their A matrices are stacked, and the rows of B are in the order of the projection's
rows (model_converters.families.parts.adapter_rows). Each row of B is multiplied only with the A of its own module. The
projections of transformers' model (strategy fsdp2) fuse nothing: each has an adapter of its own. Both models have the
same adapters under PEFT's names, so their checkpoints and exports are equal.

Source: Hu et al., LoRA (arXiv 2106.09685), section 4.1; rsLoRA (2312.03732); initial values as in peft's LoraLayer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from math import sqrt
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_rl.config.models import LoraConfig
from mcore_rl.megatron.model.names import canonical_name, canonical_tensors
from mcore_rl.megatron.model.output import ModelChunk, unwrap
from mcore_rl.megatron.model.rows import rows_of
from mcore_rl.megatron.model.shards import local_shard
from mcore_rl.resolved.adapters import base_rows, bound_adapters, check_adapter, scale_of
from model_converters.families.parts.adapter_rows import PREFIX, A, B
from model_converters.hf.adapter_reader import LoraAdapter
from model_converters.hf.shards import TensorFiles
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement, local_shape, segments_of
from model_converters.mapping.table import BoundRow, bind
from model_converters.mapping.transforms import Shape

_Projected: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]
"""Output of a projection of transformers' model, or of Megatron's with its bias."""
Read = Callable[[str, Shape], torch.Tensor]
"""Returns an adapter's unsharded tensor, given its PEFT name and shape."""


@dataclass(frozen=True)
class Factor:
    """This rank's shard of matrix A or B of an adapter."""

    bound: BoundRow
    shard: int
    num_shards: int

    @property
    def shape(self) -> Shape:
        return local_shape(self.bound.row, self.num_shards)

    def parts(self) -> Iterator[tuple[str, Shape, int, tuple[int, int, int]]]:
        """Yield the parts of the shard: (PEFT name, unsharded shape, dim, (start in the unsharded tensor, start in the
        shard, length))."""
        row = self.bound.row
        for part, start, local_start, length in segments_of(row, self.shard, self.num_shards):
            yield self.bound.hf[part], row.shapes[part], row.dim, (start, local_start, length)

    def make(self, like: torch.Tensor) -> torch.nn.Parameter:
        """Create the parameter with zeros, in the dtype and on the device of the weight `like`."""
        parameter = torch.nn.Parameter(torch.zeros(self.shape, dtype=like.dtype, device=like.device))
        if self.bound.row.axis != "none":
            # Without these attributes gradient norms would count only the shard of the first tensor-parallel rank.
            tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, self.bound.row.dim, 1)
        return parameter

    @torch.no_grad()
    def fill(self, parameter: torch.Tensor, read: Read) -> None:
        """Copy the shard's parts of the tensors from `read` into `parameter`."""
        for name, shape, dim, (start, local_start, length) in self.parts():
            parameter.narrow(dim, local_start, length).copy_(read(name, shape).narrow(dim, start, length))


class Adapter(torch.nn.Module):
    """Adapter of one projection; its result is added to the projection's output.

    Parameters: a [P r, n] for P adapted modules; b [m, r]; m and n: shape of the weight on this rank.
    """

    def __init__(
        self, a: Factor, b: Factor, config: TransformerConfig, scale: float, weight: torch.nn.Parameter
    ) -> None:
        super().__init__()
        rows = local_shard(weight)
        # This rank has only rows of a sharded weight; the weight itself is a meta tensor.
        self.rows = None if rows is None else slice(*rows_of(weight))
        weight = weight if rows is None else rows
        self.factors = {"a": a, "b": b}
        self.scale, self.enabled = scale, True
        self.a, self.b = a.make(weight), b.make(weight)
        self.split_sequence = config.sequence_parallel
        self.by_rows, self.by_columns = b.bound.row.axis != "none", a.bound.row.axis != "none"
        for parameter, sharded in ((self.a, self.by_columns), (self.b, self.by_rows)):
            parameter.sequence_parallel = self.split_sequence and not sharded  # type: ignore[attr-defined]
        # Not persistent: the mask follows from the layout and must not be in checkpoints.
        self.register_buffer("owners", _owners(b, len(a.bound.hf), weight.device), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute scale * B (A x). Shapes: the projection's input -> its output."""
        return F.linear(self._exchange(F.linear(inputs, self.a)) * self.scale, self._wide_b())

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W + scale * B A as a new tensor, computed in float32 and rounded once. `weight` has the rows of W that
        this rank keeps."""
        wide, a = self._wide_b().detach()[self.rows or ...].float(), self.a.detach().float()
        return torch.addmm(weight.detach().float(), wide, a, alpha=self.scale).to(weight.dtype)

    def _wide_b(self) -> torch.Tensor:
        """Expand b to [m, P r]: each row is in the columns of its module; other columns are zero."""
        if self.owners is None:
            return self.b
        return torch.where(self.owners, self.b.unsqueeze(1), 0).flatten(1)

    def _exchange(self, low: torch.Tensor) -> torch.Tensor:
        """Communicate A x of this rank, [s, ..., P r], as required by the sharding of W (table above)."""
        if self.by_rows and self.split_sequence:
            # Each rank multiplies the gathered A x with its own rows of B: the backward pass must sum the gradients.
            return tensor_parallel.gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        if self.by_rows:
            return tensor_parallel.copy_to_tensor_model_parallel_region(low)
        if self.by_columns and self.split_sequence:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(low)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(low) if self.by_columns else low


def _owners(b: Factor, num_modules: int, device: torch.device) -> torch.Tensor | None:
    """Mask [m, P, 1]: True if a row of b belongs to a module; None if one module has all rows."""
    owners = torch.zeros(b.shape[0], num_modules, 1, dtype=torch.bool)
    for part, _, local_start, length in segments_of(b.bound.row, b.shard, b.num_shards):
        owners[local_start : local_start + length, part] = True
    return None if owners.all() else owners.to(device)


def attach(chunks: Sequence[ModelChunk], factors: dict[str, Factor], scale: float, read: Read) -> None:
    """Freeze the chunks and add adapters, with values from `read`, to all projections for which `factors` contains A
    and B (keys: canonical name + suffix). Call it before the chunks are wrapped."""
    remaining = dict(factors)
    for chunk in chunks:
        # Before the adapters are added, so that only they are trained.
        chunk.requires_grad_(False)
        chunk.has_adapters = True
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_start_graph)
        for live_name, module in list(chunk.named_modules()):  # a copy: adapters are added to the modules
            weight = getattr(module, "weight", None)
            if not isinstance(weight, torch.nn.Parameter):
                continue
            name = canonical_name(chunk, f"{live_name}.weight").removesuffix(".weight")
            if name + A in remaining:
                a, b = remaining.pop(name + A), remaining.pop(name + B)
                module.adapter = Adapter(a, b, chunk.config, scale, weight)
                a.fill(module.adapter.a, read)
                b.fill(module.adapter.b, read)
                module.register_forward_hook(_add)
    assert not remaining, f"the model has no projection for {sorted(remaining)}"


def _add(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: _Projected) -> _Projected:
    if not module.adapter.enabled:
        return output
    update = module.adapter(inputs[0])
    return output + update if isinstance(output, torch.Tensor) else (output[0] + update, output[1])


def _start_graph(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    """Make the embedding's output require a gradient. Activation recomputation records gradients only if an input
    requires them, and with frozen weights the input of the first layer would not."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


def adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Adapter]]:
    """Yield (canonical name of the weight, adapter) for all projections with an adapter."""
    for chunk in map(unwrap, chunks):
        for live_name, module in chunk.named_modules():
            if isinstance(module, Adapter):
                yield canonical_name(chunk, live_name.removesuffix("adapter") + "weight"), module


def has_adapters(chunks: Sequence[torch.nn.Module]) -> bool:
    """Return whether the run trains adapters, even if this rank has none (a stage without layers)."""
    return any(unwrap(chunk).has_adapters for chunk in chunks)


def adapter_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[Factor, torch.nn.Parameter]]:
    """Yield all trained matrices of this rank with their descriptions."""
    for _, adapter in adapters(chunks):
        for name, factor in adapter.factors.items():
            yield factor, getattr(adapter, name)


@contextmanager
def base_only(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Return a context in which all adapters are disabled, so that the chunks compute the base model."""
    attached = [adapter for _, adapter in adapters(chunks)]
    for adapter in attached:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in attached:
            adapter.enabled = True


class MergedTensors(Mapping[str, torch.Tensor]):
    """Tensors by canonical name. A tensor with an adapter is merged on access into a new tensor; others share memory
    with the model. The last merged tensor is cached, because a fused projection is read once per HF module in it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], adapters: Mapping[str, Adapter]) -> None:
        self._tensors, self._adapters = tensors, adapters
        self._last: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        adapter = self._adapters.get(name)
        if adapter is None:
            return self._tensors[name]
        if self._last is None or self._last[0] != name:
            self._last = None  # free its memory before merging the next
            self._last = name, adapter.merged(self._tensors[name])
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def merged_tensors(chunks: Sequence[torch.nn.Module]) -> Mapping[str, torch.Tensor]:
    """Return the tensors of names.canonical_tensors with adapters merged into their weights."""
    adapters_by_name = dict(adapters(chunks))
    tensors = canonical_tensors(chunks)
    return MergedTensors(tensors, adapters_by_name) if adapters_by_name else tensors


def attach_adapters(
    chunks: Sequence[ModelChunk], lora: LoraConfig, hf_config: dict[str, object], layout: TrainLayout, *, seed: int
) -> None:
    """Freeze the chunks and add adapters: loaded from lora.path, or initialized, identically in every layout.
    Not collective.

    Raises: ConfigError.
    """
    coordinates = layout.coordinates(dist.get_rank())
    dtype = next(chunks[0].parameters()).dtype
    bound = bound_adapters(lora, hf_config, dtype, layout)
    # Placement needs the base rows too: an adapter is sharded like the projection that it adapts.
    placement = Placement([*bind(base_rows(hf_config, layout), hf_config, dtype), *bound], layout)
    shards = ((row, placement.shard_at(row, coordinates)) for row in bound)
    factors = {row.mcore: Factor(row, *shard) for row, shard in shards if shard is not None}
    files = TensorFiles()
    read = _initial(seed) if lora.path is None else _stored(check_adapter(lora, hf_config), files)
    try:
        attach(chunks, factors, scale_of(lora), read)
    finally:
        files.close()


def _initial(seed: int) -> Read:
    """Initialize like PEFT: A uniform in +-1 / sqrt(n), B zero. Each matrix has its own random stream, so that values
    do not depend on the layout."""

    def read(name: str, shape: Shape) -> torch.Tensor:
        values = torch.zeros(shape)
        # B stays zero, so that the adapted model starts as the base model.
        if ".lora_A." in name:
            digest = blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
            stream = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            torch.nn.init.kaiming_uniform_(values, a=sqrt(5), generator=stream)
        return values

    return read


def _stored(adapter: LoraAdapter, files: TensorFiles) -> Read:
    pairs = {"A": "a", "B": "b"}
    stored = {
        f"{PREFIX}{update.module}.lora_{side}.weight": getattr(update, field)
        for update in adapter.updates.values()
        for side, field in pairs.items()
    }
    return lambda name, shape: files.read(name, stored[name])
