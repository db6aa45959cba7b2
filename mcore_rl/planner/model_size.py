"""Number of parameters of the model: in total, per token and on every rank. Sums over the weight table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from mcore_rl.config.roles import POLICY
from mcore_rl.resolved.layout import conversion_errors, model_arguments
from model_converters.hf.value_head import model_rows
from model_converters.mapping.layout import TrainLayout
from model_converters.mapping.placement import Placement, held_shape
from model_converters.mapping.separate import trainer_rows
from model_converters.mapping.table import BoundRow, bind, is_parameter


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters of a model.

    `active` counts the parameters that one token uses: both embeddings, all dense weights and the experts that the
    token is routed to. `experts` counts the routed experts alone.
    """

    total: int
    active: int
    experts: int


def bound_rows(
    hf_config: dict[str, Any],
    dtype: torch.dtype,
    key: str = POLICY.checkpoint,
    layout: TrainLayout | None = None,
    *,
    has_value_head: bool = False,
) -> list[BoundRow]:
    """Bind the model's weight table to exact names: the family's table, or the table of the tensors that the ranks of
    `layout` hold. `key` names the model in errors. has_value_head: see model_rows.

    Raises: ConfigError.
    """
    with conversion_errors(f"{key}: "):
        rows = model_rows(hf_config, has_value_head=has_value_head)
        return bind(rows if layout is None else trainer_rows(rows, layout), hf_config, dtype)


def model_size(hf_config: dict[str, Any], rows: Sequence[BoundRow]) -> ModelSize:
    """Count every parameter once, independently of the layout."""
    total = experts = 0
    for bound in rows:
        if bound.row.copy_of_embedding or bound.row.repeats or not is_parameter(bound):
            continue
        elements = sum(prod(shape) for shape in bound.row.shapes)
        total += elements
        if bound.expert is not None:
            experts += elements
    sizes = model_arguments(hf_config).transformer
    # Every token uses this share of the routed experts.
    used = sizes["moe_router_topk"] / sizes["num_moe_experts"] if experts else 0.0
    return ModelSize(total, round(total - experts + experts * used), experts)


def parameters_by_rank(rows: Sequence[BoundRow], layout: TrainLayout) -> np.ndarray:
    """Count the parameters of every rank from the weight table. A replicated parameter counts on each holder.

    Shapes: int64 [world_size].
    Raises: LayoutError listing all sizes that cannot be divided.
    """
    placement = Placement(rows, layout)
    parameters = np.zeros(layout.world_size, np.int64)
    seen: set[tuple[str, range]] = set()
    for bound in rows:
        if not is_parameter(bound):
            continue
        for holding in placement.holdings(bound):
            # The embedding row of multi-token prediction is the same tensor on stages that hold both.
            key = (bound.mcore, holding.ranks)
            if key not in seen:
                seen.add(key)
                ranks = holding.ranks
                parameters[ranks.start : ranks.stop : ranks.step] += prod(held_shape(bound.row, holding.held))
    return parameters
