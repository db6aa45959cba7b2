"""Part of an HF tensor that a vLLM rank keeps, derived from the tensor's name.

An independent oracle for mcore_rl.weights.slices.shard_map, which derives it from the weight table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.weights.slices.engine_layout import EngineLayout

Box = tuple[slice | torch.Tensor, ...]
"""Index of a tensor; rows that do not follow each other are a tensor of numbers."""
ROWS = re.compile(r"\.(q_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|w1|w3)\.(weight|bias)$")
COLUMNS = re.compile(r"\.(o_proj|out_proj|down_proj|w2)\.weight$")
DELTA_NET = re.compile(r"\.linear_attn\.(conv1d|in_proj_\w+|A_log|dt_bias)")
"""Tensors of gated delta nets whose rows are divided."""
KEYS_AND_VALUES = re.compile(r"\.(k_proj|v_proj)\.(weight|bias)$")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Place:
    """Coordinates of an engine rank."""

    tp: int
    pp: int
    dp: int

    @classmethod
    def of(cls, layout: EngineLayout, rank: int) -> Place:
        rank, tp = divmod(rank, layout.tp)
        dp, pp = divmod(rank, layout.pp)
        return cls(tp, pp, dp)


def box(name: str, shape: tuple[int, ...], config: dict[str, Any], layout: EngineLayout, rank: int) -> Box | None:
    """Return the part of the tensor that the rank keeps, or None."""
    place = Place.of(layout, rank)
    if not _is_here(name, config, layout, place):
        return None
    size, index = layout.tp, place.tp
    expert = EXPERT.search(name)
    if expert:
        size, index = layout.tp * layout.dp, place.tp + layout.tp * place.dp
        if layout.expert_parallel:
            if index != _owner(int(expert[1]), _num_experts(config), size):
                return None
            size, index = 1, 0
    whole = tuple(slice(0, length) for length in shape)
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        each = -(-shape[0] // 64) * 64 // size
        rows = slice(min(each * index, shape[0]), min(each * (index + 1), shape[0]))
        return (rows, *whole[1:]) if rows.start < rows.stop else None
    if KEYS_AND_VALUES.search(name):
        heads = config["num_key_value_heads"]
        return (_part(shape[0], min(heads, size), index * heads // size if size > heads else index), *whole[1:])
    if ROWS.search(name):
        return (_part(shape[0], size, index), *whole[1:])
    net = DELTA_NET.search(name)
    if net:
        sections = _net_sections(net[1], shape[0], config)
        starts = [sum(sections[:number]) for number in range(len(sections))]
        parts = [_part(length, size, index) for length in sections]
        rows = [torch.arange(at + part.start, at + part.stop) for at, part in zip(starts, parts, strict=True)]
        return (torch.cat(rows), *whole[1:])
    if COLUMNS.search(name):
        return (whole[0], _part(shape[1], size, index))
    return whole


def _net_sections(tensor: str, length: int, config: dict[str, Any]) -> list[int]:
    """Return the numbers of rows of a tensor's sections, each of which the ranks divide."""
    if tensor not in ("conv1d", "in_proj_qkv"):
        return [length]  # one section, or ordered by key heads
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return [keys, keys, length - 2 * keys]


def _is_here(name: str, config: dict[str, Any], layout: EngineLayout, place: Place) -> bool:
    last = layout.pp - 1
    layer = LAYER.match(name)
    if layer is None:
        first = name == "model.embed_tokens.weight"
        return place.pp in ((0, last) if first and config["tie_word_embeddings"] else (0,) if first else (last,))
    if int(layer[1]) >= config["num_hidden_layers"]:
        # Draft layers share embedding and head with the model.
        shared = name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
        return layout.draft_layers and place.pp == last and not shared
    each, rest = divmod(config["num_hidden_layers"], layout.pp)
    counts = [each + (layout.pp - 1 - rest <= stage < layout.pp - 1) for stage in range(layout.pp)]
    return sum(counts[: place.pp]) <= int(layer[1]) < sum(counts[: place.pp + 1])


def _num_experts(config: dict[str, Any]) -> int:
    return int(next(config[key] for key in ("num_experts", "n_routed_experts", "num_local_experts") if key in config))


def _owner(expert: int, num_experts: int, size: int) -> int:
    counts = [num_experts // size + (rank < num_experts % size) for rank in range(size)]
    return next(rank for rank in range(size) if expert < sum(counts[: rank + 1]))


def _part(length: int, size: int, index: int) -> slice:
    return slice(length // size * index, length // size * (index + 1))
