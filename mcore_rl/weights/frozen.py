"""Weights that training never changes (frozen). Engines receive them only with their first update.

| frozen | unless |
|---|---|
| vision tower | actor.train_vision is set |
| with adapters (actor.lora), every weight without one: embeddings, head, norms, routers, routed experts | |
| indexer of sparse attention, whose choices have no gradient | the trainer holds HF tensors |

The correction bias of a router is sent with the router's weight, which is trained.

Engines load modules as a whole and fuse some of them, so a weight whose module has a trained part is sent with every
update. Example, an adapter of q_a_proj only: engines fuse it with kv_a_proj_with_mqa, so both are sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_rl.weights.slices.engine_rows import FUSED_MODULES
from model_converters.families import family_for
from model_converters.families.parts.adapter_rows import A, adapter_rows
from model_converters.families.parts.hf_config import HFConfig
from model_converters.families.parts.vision import MCORE_PREFIX
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.separate import trainer_rows
from model_converters.mapping.table import Row

if TYPE_CHECKING:
    from mcore_rl.config.models import ActorConfig

_FUSED = {part: fused for fused, parts in FUSED_MODULES.items() for part in parts}

RowKey = tuple[str, tuple[int, ...]]
"""Name and layers of a row, with placeholders; unique in a weight table."""


@dataclass(frozen=True)
class TrainedWeights:
    """Weights that training changes. vision: the vision tower is trained. adapters: names of the modules with adapters
    (actor.lora.target_modules), (): all possible ones; None: there are no adapters, and all weights are trained."""

    vision: bool = True
    adapters: tuple[str, ...] | None = None

    @classmethod
    def of(cls, actor: ActorConfig) -> TrainedWeights:
        return cls(actor.train_vision, tuple(actor.lora.target_modules) if actor.lora.rank else None)


ALL_TRAINED = TrainedWeights()


def row_key(row: Row) -> RowKey:
    return row.mcore, row.layers


def frozen_rows(hf_config: HFConfig, layout: TrainLayout, trained: TrainedWeights) -> frozenset[RowKey]:
    """Return the rows that engines need only once, of the weight table of the ranks of `layout`.

    Raises: ConversionError for a target without a module.
    """
    family = family_for(hf_config).rows(hf_config)
    held = trainer_rows(family, layout)
    adapted = None
    if trained.adapters is not None:
        adapters = adapter_rows(family, trained.adapters, 1, layout)
        adapted = {(row.mcore.removesuffix(A) + ".weight", row.layers) for row in adapters if row.mcore.endswith(A)}
    sent = [row for row in held if _changes(row, layout, trained, adapted)]
    frozen = [row for row in held if not _changes(row, layout, trained, adapted)]
    # A row that is sent because of one of its modules may belong to other modules too.
    while sent:
        modules = {module for row in sent for module in _modules(row)}
        sent = [row for row in frozen if not modules.isdisjoint(_modules(row))]
        frozen = [row for row in frozen if modules.isdisjoint(_modules(row))]
    return frozenset(row_key(row) for row in frozen)


def _changes(row: Row, layout: TrainLayout, trained: TrainedWeights, adapted: set[RowKey] | None) -> bool:
    if adapted is not None:
        return row_key(row) in adapted
    if row.mcore.startswith(MCORE_PREFIX):
        return trained.vision
    return layout.hf_tensors or ".indexer." not in row.mcore


def _modules(row: Row) -> Iterator[tuple[str, int]]:
    """Yield the engine's modules that contain the tensors of a row, by HF name with placeholders, and layer."""
    for name in row.hf:
        folder, _, module = name.rpartition(".")[0].rpartition(".")
        for layer in row.layers or (-1,):
            yield f"{folder}.{_FUSED.get(module, module)}", layer
