"""Initial values of adapters, and weights with merged adapters for export and weight sync."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from math import sqrt

import torch
import torch.distributed as dist

from mcore_rl.config.models import LoraConfig
from mcore_rl.megatron.lora.adapters import Adapter, Factor, Read, adapters, attach
from mcore_rl.megatron.model.names import canonical_tensors
from mcore_rl.megatron.model.output import PolicyModel
from mcore_rl.resolved.adapters import base_rows, bound_adapters, check_adapter, scale_of
from model_converters.families.parts.adapter_rows import PREFIX
from model_converters.hf.adapter_reader import LoraAdapter
from model_converters.hf.files import TensorFiles
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement
from model_converters.mapping.table import bind
from model_converters.mapping.transforms import Shape


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
    chunks: Sequence[PolicyModel], lora: LoraConfig, hf_config: dict[str, object], layout: TrainLayout, *, seed: int
) -> None:
    """Freeze the chunks and add adapters: loaded from lora.path, or initialized, identically in every layout.
    Not collective.

    Raises: ConfigError.
    """
    coordinates = layout.coordinates(dist.get_rank())
    dtype = next(chunks[0].parameters()).dtype
    bound = bound_adapters(lora, hf_config, dtype)
    # Placement needs the base rows too: an adapter is sharded like the projection that it adapts.
    placement = Placement([*bind(base_rows(hf_config), hf_config, dtype), *bound], layout)
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
