"""What one rank of a rollout engine holds: its weights, and how much KV cache is left beside them.

Weights: matrices are divided by rollout.tp, the experts too (with rollout.expert_parallel whole experts, else
slices: the same bytes); norms, routers and the down projections of latent attention are on every rank.

KV cache per token and layer: grouped queries 2 x groups / tp (at least one) x head size, latent attention
kv_lora_rank + the rotary part, on every rank. On GPUs it gets rollout.gpu_memory_fraction of the memory, less weights
and workspace: hidden states of the batch through the widest layer, and float32 logits of the running sequences, twice.
On CPU it is rollout.kv_cache_gib.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from mcore_rl.config.schema import ClusterConfig, RolloutConfig
from model_converters.families import ModelArguments
from model_converters.mapping.placement import local_shape
from model_converters.mapping.table import BoundRow

GIB = 2**30
ASLEEP_BYTES = GIB
"""What a sleeping engine keeps: graphs, buffers and whatever is not in its pools."""
DEFAULT_BATCHED_TOKENS = 8192
"""vLLM's default of max_num_batched_tokens for a server on current GPUs."""


@dataclass(frozen=True)
class EngineRank:
    """Bytes of one engine rank. `sequences`: of full length, that the KV cache holds."""

    weights_bytes: int
    workspace_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    sequences: float

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.workspace_bytes + max(self.kv_cache_bytes, 0)


def engine_rank(
    rollout: RolloutConfig,
    cluster: ClusterConfig,
    rows: Sequence[BoundRow],
    arguments: ModelArguments,
    *,
    element_bytes: int,
    cuda: bool,
) -> EngineRank:
    """Return the bytes of an engine's fullest rank. kv_cache_bytes is negative if the weights alone do not fit."""
    weights = engine_weights(rows, rollout.tp, element_bytes)
    workspace = _workspace(rollout, arguments, element_bytes) if cuda else 0
    if cuda:
        budget = rollout.gpu_memory_fraction * cluster.gpu_memory_gib * GIB
        cache = int(budget) - weights - workspace
    else:
        cache = int(rollout.kv_cache_gib * GIB)
    per_token = kv_bytes_per_token(arguments.transformer, rollout.tp, element_bytes)
    return EngineRank(weights, workspace, cache, per_token, max(cache, 0) / (per_token * longest_sequence(rollout)))


def longest_sequence(rollout: RolloutConfig) -> int:
    """Return the tokens of the longest prompt and response together."""
    return rollout.max_prompt_tokens + rollout.max_response_tokens


def engine_weights(rows: Sequence[BoundRow], tp: int, element_bytes: int) -> int:
    """Bytes of the weights of the fullest rank."""
    total = 0.0
    for bound in rows:
        if bound.row.copy_of_embedding or bound.row.place == "mtp":
            continue
        whole = sum(prod(shape) for shape in bound.row.shapes)
        if bound.expert is not None:
            total += whole / tp
        elif bound.row.axis == "none":
            total += whole
        else:
            # By the trainer's own transform: it repeats key-value heads where there are fewer than ranks.
            total += prod(local_shape(bound.row, tp))
    return int(total * element_bytes)


def kv_bytes_per_token(sizes: dict[str, Any], tp: int, element_bytes: int) -> int:
    """Of all layers, on one rank."""
    if sizes.get("multi_latent_attention"):
        width = sizes["kv_lora_rank"] + sizes["qk_pos_emb_head_dim"]
    else:
        width = 2 * max(sizes["num_query_groups"] // tp, 1) * sizes["kv_channels"]
    return int(sizes["num_layers"] * width * element_bytes)


def _workspace(rollout: RolloutConfig, arguments: ModelArguments, element_bytes: int) -> int:
    sizes, tp = arguments.transformer, rollout.tp
    tokens = rollout.max_batched_tokens or DEFAULT_BATCHED_TOKENS
    widest = 2 * sizes["ffn_hidden_size"] / tp
    if sizes.get("num_moe_experts"):
        # Dispatched tokens: every rank sees the whole batch, and a slice of each expert or a part of the experts.
        widest = max(widest, sizes["moe_router_topk"] * (sizes["hidden_size"] + 2 * sizes["moe_ffn_hidden_size"]) / tp)
    hidden = (4 * sizes["hidden_size"] + widest) * tokens * element_bytes
    running = min(rollout.max_concurrent_requests, tokens)
    return int(hidden + 2 * 4 * running * arguments.vocab_size / tp)
