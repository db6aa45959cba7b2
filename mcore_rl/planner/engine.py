"""Memory of one rank of a rollout engine: weights, workspace and KV cache.

Weights: matrices are divided by rollout.tp. Experts are divided too, as slices or (rollout.expert_parallel) as whole
experts, which takes the same bytes. Norms, routers and the down projections of latent attention are on every rank. With
rollout.data_parallel_attention, only the experts are divided. With rollout.quantization=fp8, matrices of attention,
MLPs and experts take a byte per element and a scale per block; with int4, experts take half a byte and a scale per
group. The KV cache is unchanged.

With rollout.draft=mtp, multi-token-prediction layers have weights and a KV cache too.

KV cache per token and layer: 2 x max(groups / tp, 1) x head size for grouped-query attention. Latent attention stores
kv_lora_rank + the rotary part on every rank. On GPUs the cache gets rollout.gpu_memory_fraction of the memory minus
weights, workspace and the memory that stays during sleep. On CPU the cache is rollout.kv_cache_gib, and the workspace
is not counted. SGLang's fraction contains only weights and KV cache: all other memory is beside it. Buffers of DeepEP
are not counted. With rollout.data_parallel_attention each rank has the cache and the workspace of its own requests, an
equal part.

The workspace is the hidden states of a batch in the widest layer, plus the sampling of all running sequences. Every
rank gathers the logits of the whole vocabulary and samples. Bytes per logit:

| engine and sampling | tensors | bytes |
|---|---|---|
| vLLM | logits in a 16-bit dtype, float32 logits, log-probabilities, probabilities | 14 (float32, float32_head: 12) |
| vLLM, repetition penalty | counts and masks of prompts and responses, a product | 14 more, not profiled |
| SGLang | float32 logits, and their softmax or log-probabilities | 8 |
| SGLang, top-p, top-k or min-p | probabilities, sorted values and indices, torch's sort (20 or 32) | 36 or 48 |
| SGLang, repetition penalty | penalties of all tokens | 4 more |
| vLLM, rollout.keep_sampling_mask | masks of all rows, and a copy of those that are recorded | 2 more, not profiled |
| SGLang, rollout.keep_sampling_mask | the same; with rollout.overlap_schedule, also of the batch before | 2 or 3 more |

An engine of a teacher also computes logits of prompts, sequence by sequence: a row per token of a pass, with the logits
and float32 log-probabilities (bytes of a logit + 4), not profiled. While a sequence is computed, the log-probabilities
of the one before it are still in memory (vllm/v1/worker/gpu_model_runner.py, _get_prompt_logprobs_dict).

A request has one row of logits, with a draft of k tokens k + 1, and one more while a draft model samples. At most
rollout.draft_below - 1 requests have drafts. With drafts, vLLM's profile has two rows for each request; the rows beyond
them are not profiled.

torch sorts fewer than 128 rows in two passes, with 32 bytes of temporary memory per element, else with 20. vLLM
truncates in place. Sources: vllm/v1/sample/sampler.py and model_executor/layers/utils.py (0.32),
sglang/srt/layers/sampler.py (0.5.23), aten/native/cuda/SortStable.cu (torch).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod
from string import digits

from mcore_rl.config.quantization import BLOCK, FP8, GROUPS, INT4, UNQUANTIZED
from mcore_rl.config.sampling import MTP, NO_DRAFTS
from mcore_rl.config.schema import ClusterConfig, RolloutConfig
from mcore_rl.weights.engine_config import engine_layout
from mcore_rl.weights.slices.engine_layout import EngineLayout
from mcore_rl.weights.slices.engine_rows import is_divided, is_loaded, row_quantization
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.mapping.placement import local_shape
from model_converters.mapping.table import BoundRow

MIB, GIB = 2**20, 2**30
ASLEEP_BYTES = GIB
"""Memory of a sleeping engine: buffers outside its memory pools, and vLLM's CUDA graphs. Measured: 1.5 GiB with a CUDA
context (a tiny model in vLLM 0.32 on an H200)."""
SGLANG_GRAPHS_BYTES = 4 * GIB
"""Upper bound of SGLang's CUDA graphs; 1 to 4 GiB with its default batch sizes, not measured here."""
DEFAULT_BATCHED_TOKENS = 8192
"""vLLM's default of max_num_batched_tokens for a server on current GPUs."""
FP8_BYTES = 1 + 4 / BLOCK**2
"""Bytes per element of a matrix in FP8: a code, and a part of its block's float32 scale."""
SORTED_TWICE = 128
"""Number of rows below which torch sorts in two passes on a GPU."""


@dataclass(frozen=True)
class EngineRank:
    """Bytes of one engine rank.

    `sequences` is the number of full-length sequences that the KV cache holds, on `request_ranks` ranks that each have
    their own. `graphs_bytes` are CUDA graphs that keep their memory during sleep. `unprofiled_bytes` is workspace that
    vLLM's fraction does not contain.

    In host memory: `kept_bytes` are the weights of an engine that sleeps and keeps them; `routing_bytes` are SGLang's
    experts of all tokens in the KV cache.
    """

    weights_bytes: int
    workspace_bytes: int
    kv_cache_bytes: int
    kv_bytes_per_token: int
    sequences: float
    graphs_bytes: int = 0
    unprofiled_bytes: int = 0
    kept_bytes: int = 0
    routing_bytes: int = 0
    request_ranks: int = 1

    @property
    def engine_sequences(self) -> float:
        """Number of full-length sequences that all ranks of the engine hold."""
        return self.sequences * self.request_ranks

    @property
    def total_bytes(self) -> int:
        """Bytes on the GPU while the engine generates."""
        working = self.workspace_bytes + self.unprofiled_bytes
        return self.updated_bytes + working + max(self.kv_cache_bytes, 0)

    @property
    def updated_bytes(self) -> int:
        """Bytes on the GPU during a weight sync."""
        return self.asleep_bytes + self.weights_bytes

    @property
    def asleep_bytes(self) -> int:
        """Bytes on the GPU during sleep."""
        return ASLEEP_BYTES + self.graphs_bytes


def engine_rank(
    rollout: RolloutConfig,
    cluster: ClusterConfig,
    rows: Sequence[BoundRow],
    arguments: ModelArguments,
    *,
    element_bytes: int,
    cuda: bool,
    captures_routing: bool = False,
    float32_head: bool = False,
    scores_prompts: bool = False,
) -> EngineRank:
    """Compute the bytes of an engine's fullest rank. kv_cache_bytes is negative if weights and workspace do not fit.

    captures_routing: the engine returns the experts of all tokens. float32_head: model.float32_head. scores_prompts:
    the engine returns log-probabilities of prompts.
    """
    layout = engine_layout(rollout)
    tensors = tensor_bytes(rows, layout, element_bytes, rollout.quantization, rollout.quantization_group)
    weights = int(sum(tensors.values()))
    sizes, sglang = arguments.transformer, rollout.engine == "sglang"
    num_layers = sizes["num_layers"] + (arguments.mtp_num_layers if layout.draft_layers else 0)
    per_token = kv_bytes_per_token(sizes, layout.tp, element_bytes, num_layers)

    def sequences(cache: int) -> float:
        return max(cache, 0) / (per_token * longest_sequence(rollout))

    if not cuda:
        cache = int(rollout.kv_cache_gib * GIB)
        return EngineRank(weights, 0, cache, per_token, sequences(cache), request_ranks=layout.dp)
    hidden = _hidden(rollout, sizes, element_bytes)
    logit = 4 if float32_head else element_bytes
    sampling, unprofiled = _sampling(rollout, logit)
    if scores_prompts:
        unprofiled += min(_batched_tokens(rollout), 2 * longest_sequence(rollout)) * (logit + 4)
    workspace = hidden + sampling * arguments.vocab_size
    cache = int(rollout.gpu_memory_fraction * cluster.gpu_memory_gib * GIB) - weights
    cache -= 0 if sglang else workspace + ASLEEP_BYTES
    routing = int(max(cache, 0) / per_token * _routing_bytes_per_token(sizes)) if captures_routing and sglang else 0
    return EngineRank(
        weights,
        workspace,
        cache,
        per_token,
        sequences(cache),
        graphs_bytes=SGLANG_GRAPHS_BYTES if sglang and not rollout.enforce_eager else 0,
        unprofiled_bytes=unprofiled * arguments.vocab_size,
        # SGLang's copies have sizes that are powers of two (engines/sglang/devices/memory.py).
        kept_bytes=weights if sglang else _rounded_weights(tensors.values()),
        routing_bytes=routing,
        request_ranks=layout.dp,
    )


def longest_sequence(rollout: RolloutConfig) -> int:
    """Return the maximum length of prompt and response together, in tokens."""
    return rollout.max_prompt_tokens + rollout.max_response_tokens


def _rounded_weights(sizes: Iterable[float]) -> int:
    """Compute the pinned host memory of a copy of tensors: torch rounds each allocation up to a power of two."""
    return sum(1 << (ceil(size) - 1).bit_length() for size in sizes)


def tensor_bytes(
    rows: Sequence[BoundRow],
    layout: EngineLayout,
    element_bytes: int,
    quantization: str = UNQUANTIZED,
    group: int = GROUPS[-1],
) -> dict[str, float]:
    """Compute the bytes of the fullest rank by tensor. The experts of a layer are one tensor.

    quantization, group: rollout.quantization and its group.
    """
    # A matrix in INT4: half a byte per code, and a part of its group's bfloat16 scale.
    bytes_of = {UNQUANTIZED: element_bytes, FP8: FP8_BYTES, INT4: 1 / 2 + 2 / group}
    sizes: dict[str, float] = defaultdict(float)
    for bound in rows:
        if not is_loaded(bound.row, layout):
            continue
        each = bytes_of[row_quantization(bound.row, quantization)]
        whole = sum(prod(shape) for shape in bound.row.shapes)
        if bound.expert is not None:
            sizes[bound.mcore.rstrip(digits)] += whole / layout.expert_ranks * each
        elif not is_divided(bound.row):
            sizes[bound.mcore] += whole * each
        else:
            # The trainer's transform repeats key-value heads if there are fewer heads than ranks; engines do the same.
            sizes[bound.mcore] += prod(local_shape(bound.row, layout.tp)) * each
    return sizes


def kv_bytes_per_token(sizes: TransformerArguments, tp: int, element_bytes: int, num_layers: int) -> int:
    """Compute the KV cache bytes of one token in `num_layers` layers, on one rank."""
    if sizes.get("multi_latent_attention"):
        width = sizes["kv_lora_rank"] + sizes["qk_pos_emb_head_dim"]
    else:
        # With more ranks than heads, every rank holds one head.
        width = 2 * max(sizes["num_query_groups"] // tp, 1) * sizes["kv_channels"]
    return int(num_layers * width * element_bytes)


def _routing_bytes_per_token(sizes: TransformerArguments) -> int:
    """Return the bytes of SGLang's record of a token's experts: int32, with rows for layers without experts."""
    return 4 * sizes["num_layers"] * sizes["moe_router_topk"] if sizes.get("num_moe_experts") else 0


def _batched_tokens(rollout: RolloutConfig) -> int:
    # With attention data parallelism, SGLang divides the tokens of a pass among the ranks.
    return (rollout.max_batched_tokens or DEFAULT_BATCHED_TOKENS) // engine_layout(rollout).dp


def _hidden(rollout: RolloutConfig, sizes: TransformerArguments, element_bytes: int) -> int:
    tp = engine_layout(rollout).tp
    widest = 2 * sizes["ffn_hidden_size"] / tp
    if sizes.get("num_moe_experts"):
        # Estimate: dispatched tokens and expert activations are divided evenly over the ranks.
        widest = max(widest, sizes["moe_router_topk"] * (sizes["hidden_size"] + 2 * sizes["moe_ffn_hidden_size"]) / tp)
    return int((4 * sizes["hidden_size"] + widest) * _batched_tokens(rollout) * element_bytes)


def _sampling(rollout: RolloutConfig, logit_bytes: int) -> tuple[int, int]:
    """Return the bytes of sampling per token of the vocabulary: profiled by the engine or beside its fraction, and
    unprofiled. logit_bytes: bytes of a logit as the output projection returns it."""
    rows = min(rollout.max_concurrent_requests // engine_layout(rollout).dp, _batched_tokens(rollout))
    penalized = rollout.validation_repetition_penalty != 1
    if rollout.engine != "sglang":
        each = 12 + (logit_bytes if logit_bytes < 4 else 0)
        most, profiled = _rows_with_drafts(rollout, rows)
        beside = 14 * penalized + 2 * rollout.keep_sampling_mask
        return profiled * each, max(most - profiled, 0) * each + most * beside
    truncated = rollout.validation_top_p < 1 or rollout.validation_top_k > 0 or rollout.validation_min_p > 0
    truncated |= rollout.keep_sampling_mask  # formats of replies are masks too
    masks = (2 + rollout.overlap_schedule) * rollout.keep_sampling_mask
    # A smaller batch needs more memory per row.
    sorting = max(48 * min(rows, SORTED_TWICE - 1), 36 * rows)
    return (sorting if truncated else 8 * rows) + (4 * penalized + masks) * rows, 0


def _rows_with_drafts(rollout: RolloutConfig, requests: int) -> tuple[int, int]:
    """Return the largest number of rows of logits in a pass of vLLM, and their number in its profile."""
    if rollout.draft == NO_DRAFTS:
        return requests, requests
    drafting = min(rollout.draft_below - 1, requests)
    # New requests may join those whose drafts are verified.
    rows = min(requests + drafting * rollout.draft_tokens, _batched_tokens(rollout))
    return rows + (drafting if rollout.draft == MTP else 0), 2 * requests
