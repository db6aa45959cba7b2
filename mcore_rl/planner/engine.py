"""Memory of one rank of a rollout engine: weights, workspace and KV cache.

Weights: matrices are divided by rollout.tp. Experts are divided too, as slices or (rollout.expert_parallel) as whole
experts, which takes the same bytes. Norms, routers and the down projections of latent attention are on every rank.

KV cache per token and layer: 2 x max(groups / tp, 1) x head size for grouped-query attention. Latent attention stores
kv_lora_rank + the rotary part on every rank. On GPUs the cache gets rollout.gpu_memory_fraction of the memory minus
weights and workspace. The workspace is the hidden states of a batch in the widest layer, plus two float32 copies of the
logits of running sequences. On CPU the cache is rollout.kv_cache_gib, and the workspace is not counted.

SGLang's fraction contains only weights and KV cache: workspace and CUDA graphs use the memory beside it. Its graphs
keep their memory during sleep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mcore_rl.config.schema import ClusterConfig, RolloutConfig
from model_converters.families.parts.family import ModelArguments, TransformerArguments
from model_converters.mapping.placement import local_shape
from model_converters.mapping.table import BoundRow

MIB, GIB = 2**20, 2**30
ASLEEP_BYTES = GIB
"""Memory of a sleeping engine: buffers outside its memory pools, and vLLM's CUDA graphs."""
SGLANG_GRAPHS_BYTES = 4 * GIB
"""Upper bound of SGLang's CUDA graphs; 1 to 4 GiB with its default batch sizes, not measured here."""
DEFAULT_BATCHED_TOKENS = 8192
"""vLLM's default of max_num_batched_tokens for a server on current GPUs."""


@dataclass(frozen=True)
class EngineRank:
    """Bytes of one engine rank.

    `sequences` is the number of full-length sequences that the KV cache holds. `graphs_bytes` are CUDA graphs that keep
    their memory during sleep.
    """

    weights_bytes: int
    workspace_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    sequences: float
    graphs_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.workspace_bytes + self.graphs_bytes + max(self.kv_cache_bytes, 0)

    @property
    def asleep_bytes(self) -> int:
        return ASLEEP_BYTES + self.graphs_bytes


def engine_rank(
    rollout: RolloutConfig,
    cluster: ClusterConfig,
    rows: Sequence[BoundRow],
    arguments: ModelArguments,
    *,
    element_bytes: int,
    cuda: bool,
) -> EngineRank:
    """Compute the bytes of an engine's fullest rank. kv_cache_bytes is negative if weights and workspace do not fit."""
    weights = engine_weights(rows, rollout.tp, element_bytes)
    workspace = _workspace(rollout, arguments, element_bytes) if cuda else 0
    sglang = rollout.engine == "sglang"
    graphs = SGLANG_GRAPHS_BYTES if cuda and sglang and not rollout.enforce_eager else 0
    if cuda:
        budget = rollout.gpu_memory_fraction * cluster.gpu_memory_gib * GIB
        cache = int(budget) - weights - (0 if sglang else workspace)
    else:
        cache = int(rollout.kv_cache_gib * GIB)
    per_token = kv_bytes_per_token(arguments.transformer, rollout.tp, element_bytes)
    sequences = max(cache, 0) / (per_token * longest_sequence(rollout))
    return EngineRank(weights, workspace, cache, per_token, sequences, graphs)


def longest_sequence(rollout: RolloutConfig) -> int:
    """Return the maximum length of prompt and response together, in tokens."""
    return rollout.max_prompt_tokens + rollout.max_response_tokens


def engine_weights(rows: Sequence[BoundRow], tp: int, element_bytes: int) -> int:
    """Compute the weight bytes of the fullest rank."""
    total = 0.0
    for bound in rows:
        if bound.row.copy_of_embedding or bound.row.place == "mtp":
            continue  # engines hold neither a copy of the embedding nor multi-token-prediction layers
        whole = sum(prod(shape) for shape in bound.row.shapes)
        if bound.expert is not None:
            total += whole / tp
        elif bound.row.axis == "none":
            total += whole
        else:
            # The trainer's transform repeats key-value heads if there are fewer heads than ranks; engines do the same.
            total += prod(local_shape(bound.row, tp))
    return int(total * element_bytes)


def kv_bytes_per_token(sizes: TransformerArguments, tp: int, element_bytes: int) -> int:
    """Compute the KV cache bytes of one token in all layers, on one rank."""
    if sizes.get("multi_latent_attention"):
        width = sizes["kv_lora_rank"] + sizes["qk_pos_emb_head_dim"]
    else:
        # With more ranks than heads, every rank holds one head.
        width = 2 * max(sizes["num_query_groups"] // tp, 1) * sizes["kv_channels"]
    return int(sizes["num_layers"] * width * element_bytes)


def _workspace(rollout: RolloutConfig, arguments: ModelArguments, element_bytes: int) -> int:
    sizes, tp = arguments.transformer, rollout.tp
    tokens = rollout.max_batched_tokens or DEFAULT_BATCHED_TOKENS
    widest = 2 * sizes["ffn_hidden_size"] / tp
    if sizes.get("num_moe_experts"):
        # Estimate: dispatched tokens and expert activations are divided evenly over the ranks.
        widest = max(widest, sizes["moe_router_topk"] * (sizes["hidden_size"] + 2 * sizes["moe_ffn_hidden_size"]) / tp)
    hidden = (4 * sizes["hidden_size"] + widest) * tokens * element_bytes
    # Each running request has one row of logits, and sampling makes a second copy of it.
    running = min(rollout.max_concurrent_requests, tokens)
    return int(hidden + 2 * 4 * running * arguments.vocab_size / tp)
