"""How many parameters the configured model has, in all, per token and on every rank: sums over its weight table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from mcore_rl.config.roles import POLICY
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.layout import model_arguments
from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement, local_shape
from model_converters.mapping.table import BoundRow, bind


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a model. `active` are those that one token meets: everything but the experts that it is not
    routed to, with both embeddings. `experts` are the routed experts alone."""

    total: int
    active: int
    experts: int


def bound_rows(hf_config: dict[str, Any], dtype: torch.dtype, key: str = POLICY.checkpoint) -> list[BoundRow]:
    """The model's weight table with exact names.

    Raises: ConfigError.
    """
    try:
        return bind(family_for(hf_config).rows(hf_config), hf_config, dtype)
    except ConversionError as error:
        raise ConfigError(f"{key}: {error}") from error


def is_parameter(bound: BoundRow) -> bool:
    """Not a buffer: the bias that chooses experts has no gradient and no optimizer state."""
    return not bound.mcore.endswith("expert_bias")


def model_size(hf_config: dict[str, Any], rows: Sequence[BoundRow]) -> ModelSize:
    """Counts every parameter once, whatever the layout."""
    total = experts = 0
    for bound in rows:
        if bound.row.copy_of_embedding or bound.row.repeats or not is_parameter(bound):
            continue
        elements = sum(prod(shape) for shape in bound.row.shapes)
        total += elements
        if bound.expert is not None:
            experts += elements
    sizes = model_arguments(hf_config).transformer
    used = sizes["moe_router_topk"] / sizes["num_moe_experts"] if experts else 0.0
    return ModelSize(total, round(total - experts + experts * used), experts)


def parameters_by_rank(rows: Sequence[BoundRow], layout: TrainLayout) -> np.ndarray:
    """How many parameters every rank holds by the weight table; a replicated one counts on each holder.

    Shapes: int64 [world_size].
    Raises: LayoutError listing everything that does not divide.
    """
    placement = Placement(rows, layout)
    parameters = np.zeros(layout.world_size, np.int64)
    seen: set[tuple[str, range]] = set()
    for bound in rows:
        if not is_parameter(bound):
            continue
        for holding in placement.holdings(bound):
            # Multi-token prediction repeats the embedding, which is one tensor where both would be.
            key = (bound.mcore, holding.ranks)
            if key not in seen:
                seen.add(key)
                ranks = holding.ranks
                parameters[ranks.start : ranks.stop : ranks.step] += prod(local_shape(bound.row, holding.num_shards))
    return parameters
