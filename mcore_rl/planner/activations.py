"""Activations that the trainer's forward pass saves for the backward pass, by component.

Every tensor that autograd saves is one line of a table: its bytes per token of the packed row, and the recomputed
modules that free it. h is the hidden size, q and kv are heads x head size of queries and of keys, f is the intermediate
size, k the experts per token; t = tp, s = tp with sequence parallelism (else 1).

| component | saved per token | freed by |
|---|---|---|
| norms (two, four with norms after attention and MLP) | h / s and a scale, for each | |
| attention input | h / s | layernorm |
| grouped queries | qkv (q + 2 kv) / t, rotated q and k (q + kv) / t; with norms of q and k: q / t once more | |
| latent attention | both down projections before and after their norms, / s | |
| latent attention, heads | q, k, v / t | mla_up_proj |
| core attention | output q / t and a float32 log-sum per head | core_attn |
| gate of attention outputs | output and float32 gate, q / t each | |
| linear attention | output of its first projection, (2 keys + 2 values + 2 value heads) / t | |
| linear attention, other tensors | see layers/linear_attention.py | always |
| output projection | its input, q / t; the same tensor as the line above if the kernel writes the packed row | |
| MLP input (dense, router, shared expert) | h / s | layernorm |
| dense MLP | fc1's output 2 f / t, fc2's input f / t; with GELU two more of f / t | mlp |
| router | scores and map, 5 to 9 bytes x experts / s; indices, 16 to 32 bytes x k / s | moe |
| experts, of n dispatched tokens | input n h, fc1's output n 2 f / etp | moe |
| experts, activation | n f / etp; 6 n f / etp with a clamped gate | moe, moe_act |
| shared expert | 3 f_shared / t; with a gate: its output h / s and the gate 1 / s | moe, shared_experts |

n = k etp / s x plan.moe_imbalance (1 if ep is 1, because then a rank has all experts). Experts have no capacity limit,
so no token is dropped. Full recomputation saves one hidden state of h / s per `actor.recompute_layers` layers and,
while it recomputes, the whole table of that many layers.

The table covers two implementations of Megatron's layers. Local layers (CPU): float32 norms save their input, bfloat16
norms save it twice as float32; core attention copies the packed row out of per-sequence outputs; attention whose value
size differs from the query size (latent attention) saves the probabilities on CPUs, heads / t x the mean square length
over the mean length. TransformerEngine (CUDA): norms save their input in its dtype, and flash attention writes the
packed row. In sequences of more than index_topk tokens, attention to tokens that an indexer chooses saves the choices,
4 bytes x index_topk, instead of probabilities. Layers of transformers (strategy fsdp2) have a table of their own
(layers/transformers.py).

Micro-batches in flight: 1F1B has min(pp - stage, m) of m micro-batches. The interleaved schedule has its warm-up plus
one, in units of chunks: 2 (pp - stage - 1) + (vpp - 1) pp + 1. Stages also save their outputs (h / s). Added once: the
tensors that one layer recomputes, the gradients of the widest component, the gradient of the largest weight before it
is added to the buffer, and on the last stage the output projection: hidden states and statistics of the trained tokens,
two tiles of logits, and float32 gradients of the hidden states and of the weight (megatron/step/logprobs.py). With
rollout.keep_sampling_mask, also the mask of a tile, copied columns, the states in the order of the groups, the largest
sets of one row and sets of SET_TOKENS tokens of the update's other rows (megatron/step/kept_tokens.py).
With model.float32_head on GPUs, also a float32 copy of a tile's weights or hidden states.

The first stage of a model with a vision tower has its tensors, too (layers/vision.py).

With actor.quantization_aware, the rounded copies of a layer's experts exist from its forward to its backward pass.

Source: megatron-core 0.16.1, and V. Korthikanti et al. 2022, "Reducing activation recomputation", section 4, for the
accounting. tests/distributed/test_planned_activations.py compares the table with the tensors that autograd saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mcore_rl.megatron.step.kept_tokens import SET_BYTES, max_device_bytes
from mcore_rl.megatron.step.tiles import TILE_ELEMENTS
from mcore_rl.planner.layers.execution import ALWAYS, Execution, SavedTensor, core_attention
from mcore_rl.planner.layers.linear_attention import linear_attention
from mcore_rl.planner.layers.transformers import transformers_layer
from mcore_rl.planner.layers.vision import feature_bytes, tower_bytes
from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.mapping.layout import TrainLayout

SET_TOKENS = 20
"""Assumed mean size of sampling sets, which depends on the policy."""


def attention(sizes: TransformerArguments, run: Execution, *, linear: bool = False) -> Iterator[SavedTensor]:
    """Yield the tensors of a layer's attention and its norm. linear: the layer has linear attention."""
    hidden, b = sizes["hidden_size"], run.element_bytes
    yield SavedTensor("norms", run.norm(hidden) / run.scatter)
    yield SavedTensor("attention", hidden * b / run.scatter, ("layernorm",))
    if sizes.get("post_norms"):  # of attention and MLP
        yield SavedTensor("norms", 2 * run.norm(hidden) / run.scatter)
    if linear:
        yield from linear_attention(sizes, run)
        return
    yield from (_latent if sizes.get("multi_latent_attention") else _grouped)(sizes, run)


def _grouped(sizes: TransformerArguments, run: Execution) -> Iterator[SavedTensor]:
    t, b, head = run.layout.tp, run.element_bytes, sizes["kv_channels"]
    heads = sizes["num_attention_heads"] / t
    groups = max(sizes["num_query_groups"] / t, 1)
    q, kv = heads * head, groups * head
    yield SavedTensor("attention", (q + 2 * kv) * b)
    if sizes.get("qk_layernorm"):
        # The norm of keys reads the fused qkv tensor, which is already counted. Eager norms copy their input.
        copied = kv if run.norm(1) - 4 != b else 0
        norms = run.norm(head) / head * (q + copied) - 4 * (q + copied) / head + 4 * (heads + groups)
        yield SavedTensor("norms", norms)
    if sizes.get("qk_norm_over_heads"):
        # The two norms save their inputs, and the scale of a token. Keys are a part of the fused qkv tensor.
        yield SavedTensor("norms", q * b + 8)
    yield SavedTensor("attention", (q + kv) * b)
    # Unfused rotary embeddings save cosines and sines, for queries and for keys.
    if not run.fused or run.unfused_rotation:
        yield SavedTensor("attention", 4 * head * b)
    yield from core_attention(q, heads, run)
    if sizes.get("attention_output_gate"):
        yield SavedTensor("attention", q * (b + 4))


def _latent(sizes: TransformerArguments, run: Execution) -> Iterator[SavedTensor]:
    t, s, b = run.layout.tp, run.scatter, run.element_bytes
    heads = sizes["num_attention_heads"] / t
    rope, nope, value = sizes["qk_pos_emb_head_dim"], sizes["qk_head_dim"], sizes["v_head_dim"]
    q_rank, kv_rank = sizes.get("q_lora_rank"), sizes["kv_lora_rank"]
    if q_rank:
        yield SavedTensor("attention", (run.norm(q_rank) + q_rank * b) / s)
    yield SavedTensor("attention", (run.norm(kv_rank) + (kv_rank + rope) * b) / s)
    query = nope + rope
    topk = sizes.get("dsa_indexer_topk", 0)
    if topk and run.square_length > topk:
        # Blocks of queries are computed again from these tensors and the choices.
        yield SavedTensor("attention", heads * (2 * query + value) * b, ("mla_up_proj",))
        yield SavedTensor("core attention", 4 * topk, ("core_attn",))
        yield SavedTensor("attention", heads * value * b)
        return
    if run.fused or run.cuda or query == value:
        # Flash attention and torch's fused attention save the output instead of the probabilities. On CUDA torch's
        # accepts values of another size than keys (2.13, check_head_dim_size_mem_efficient).
        yield SavedTensor("attention", heads * (2 * query + value) * b, ("mla_up_proj",))
        yield from core_attention(heads * value, heads, run)
        return
    # Attention saves its own scaled copies of queries and keys.
    yield SavedTensor("attention", heads * 2 * query * b)
    yield SavedTensor("attention", heads * value * b, ("mla_up_proj",))
    yield SavedTensor("attention", 4 * rope * b)
    yield SavedTensor("core attention", heads * run.square_length * b, ("core_attn",))
    yield SavedTensor("attention", heads * value * b)


def dense_mlp(sizes: TransformerArguments, run: Execution) -> Iterator[SavedTensor]:
    """Yield the tensors of a dense MLP and its norm."""
    hidden, b, s, t = sizes["hidden_size"], run.element_bytes, run.scatter, run.layout.tp
    yield SavedTensor("norms", run.norm(hidden) / s)
    # Not freed by mlp: recomputation starts from this input.
    yield SavedTensor("mlp", hidden * b / s, ("layernorm",))
    # A gate of SiLU is one kernel. Another one also saves its activation, and a copy of up, to which Megatron adds an
    # offset.
    gate = 1 if sizes["activation_func"] == "silu" else 3
    yield SavedTensor("mlp", (2 + gate) * sizes["ffn_hidden_size"] * b / t, ("mlp",))


def experts(sizes: TransformerArguments, run: Execution) -> Iterator[SavedTensor]:
    """Yield the tensors of a mixture of experts and its norm."""
    hidden, b, s, layout = sizes["hidden_size"], run.element_bytes, run.scatter, run.layout
    width, topk, number = sizes["moe_ffn_hidden_size"], sizes["moe_router_topk"], sizes["num_moe_experts"]
    yield SavedTensor("norms", run.norm(hidden) / s)
    yield SavedTensor("moe", hidden * b / s, ("layernorm",))
    scores = 9 if sizes.get("moe_router_score_function") == "sigmoid" else 5
    yield SavedTensor("router", (scores * number + (24 if run.fused else 28) * topk) / s, ("moe",))
    # Expert-tensor-parallel ranks all receive the tokens of their group, hence the factor etp.
    dispatched = topk * layout.etp / s * (run.imbalance if layout.ep > 1 else 1.0)
    yield SavedTensor("moe", dispatched * (hidden * b + 4), ("moe",))
    yield SavedTensor("moe", dispatched * 2 * width / layout.etp * b, ("moe",))
    # A clamped gate is a sequence of torch's operations, of which six save a tensor; other gates are one kernel.
    gate = 6 if "activation_func_clamp_value" in sizes else 1
    yield SavedTensor("moe", dispatched * gate * width / layout.etp * b, ("moe", "moe_act"))
    if shared := sizes.get("moe_shared_expert_intermediate_size"):
        yield SavedTensor("moe", 3 * shared / layout.tp * b, ("moe", "shared_experts"))
    if sizes.get("moe_shared_expert_gate"):
        yield SavedTensor("moe", (hidden + 1) * b / s, ("moe", "shared_experts"))


def is_sparse(sizes: TransformerArguments, layer: int) -> bool:
    """Return True if the layer (global index) has experts."""
    if not sizes.get("num_moe_experts"):
        return False
    frequency = sizes.get("moe_layer_freq", 1)
    # Megatron reads an integer as: every N-th layer has experts, starting with the first.
    return bool(frequency[layer]) if isinstance(frequency, list) else layer % int(frequency) == 0


def is_linear(sizes: TransformerArguments, layer: int) -> bool:
    """Return True if the layer (global index) has linear attention."""
    pattern = sizes.get("linear_attention_freq")
    return bool(pattern and pattern[layer])


def layer_table(
    sizes: TransformerArguments, run: Execution, *, sparse: bool, linear: bool = False
) -> list[SavedTensor]:
    """List the tensors that one layer saves without recomputation."""
    if run.transformers:
        return list(transformers_layer(sizes, run, sparse=sparse))
    return [*attention(sizes, run, linear=linear), *(experts if sparse else dense_mlp)(sizes, run)]


def saved_bytes(table: Sequence[SavedTensor], run: Execution) -> dict[str, float]:
    """Sum the saved bytes per token of a layer by component, with selective recomputation."""
    chosen = run.section.recompute_modules if run.section.recompute == "selective" else []
    freed = {*chosen, *ALWAYS}
    return _by_component(line for line in table if not freed & set(line.freed_by))


@dataclass(frozen=True)
class ChunkActivations:
    """Bytes per token of a model chunk.

    `saved` is what one micro-batch saves, by component. `recomputed` are tensors that exist only while a layer is
    recomputed. `gradients` are the gradients of the widest component.
    """

    saved: dict[str, float]
    recomputed: float
    gradients: float

    @property
    def total(self) -> float:
        return sum(self.saved.values())


def chunk_activations(
    arguments: ModelArguments, layers: Sequence[int], run: Execution, *, last: bool
) -> ChunkActivations:
    """Compute the activations of a chunk with these layers (global indices).

    `last`: the chunk also has the final norm and the layers that predict tokens.
    """
    sizes = arguments.transformer
    hidden = sizes["hidden_size"]
    tables = [
        layer_table(sizes, run, sparse=is_sparse(sizes, layer), linear=is_linear(sizes, layer)) for layer in layers
    ]
    saved: dict[str, float] = {"tokens": 8.0}
    recomputed = 0.0
    if run.section.recompute == "full":
        interval = run.section.recompute_layers
        groups = -(-len(tables) // interval)
        saved["layer inputs"] = groups * hidden * run.element_bytes / run.scatter
        widths = [sum(line.bytes_per_token for line in table) for table in tables]
        # All tensors of the layers between two saved states exist while they are recomputed.
        recomputed = max((sum(widths[i : i + interval]) for i in range(len(widths))), default=0.0)
    else:
        for table in tables:
            _add(saved, saved_bytes(table, run))
            whole = sum(line.bytes_per_token for line in table)
            recomputed = max(recomputed, whole - sum(saved_bytes(table, run).values()))
    if last:
        _add(saved, {"norms": run.norm(hidden) / run.scatter})
        if arguments.mtp_num_layers:
            _add(saved, _multi_token(arguments, run))
    gradients = max((max(_by_component(table).values()) for table in tables), default=0.0)
    return ChunkActivations(saved, recomputed, gradients)


def _multi_token(arguments: ModelArguments, run: Execution) -> dict[str, float]:
    """Compute the multi-token-prediction layers: two norms, a projection of their outputs, a layer."""
    sizes, hidden = arguments.transformer, arguments.transformer["hidden_size"]
    table = layer_table(sizes, run, sparse=is_sparse(sizes, sizes["num_layers"] - 1))
    before_layer = (3 * run.norm(hidden) + 2 * hidden * run.element_bytes) / run.scatter
    return {"multi-token prediction": arguments.mtp_num_layers * (before_layer + sum(saved_bytes(table, run).values()))}


def _by_component(table: Iterable[SavedTensor]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for line in table:
        _add(totals, {line.component: line.bytes_per_token})
    return totals


def _add(totals: dict[str, float], more: dict[str, float]) -> None:
    for component, value in more.items():
        totals[component] = totals.get(component, 0.0) + value


@dataclass(frozen=True)
class StageActivations:
    """Peak activation bytes of one rank of a stage, in an update and in a pass without gradients."""

    components: dict[str, float]
    forward_only_bytes: float

    @property
    def total_bytes(self) -> float:
        return sum(self.components.values())


def in_flight(layout: TrainLayout, stage: int, microbatches: int) -> list[int]:
    """Return the maximum number of micro-batches in flight for every chunk of a stage.

    Source: megatron.core.pipeline_parallel.schedules.get_pp_rank_microbatches (0.16.1).
    """
    if layout.vpp is None:
        return [min(layout.pp - stage, microbatches)]
    # A unit is one micro-batch in one chunk: the warm-up of the schedule, plus the unit that runs.
    units = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    counts = [0] * layout.vpp
    for unit in range(min(units, microbatches * layout.vpp)):
        # Groups of pp micro-batches pass through the chunks one after the other.
        counts[unit // layout.pp % layout.vpp] += 1
    return counts


def stage_activations(
    arguments: ModelArguments,
    stage: int,
    run: Execution,
    *,
    microbatches: int,
    largest_weight_elements: int,
    predicts_tokens: bool = True,
) -> StageActivations:
    """Compute the peak activations of an update on a rank of `stage`.

    The last stage has the output projection or, with predicts_tokens=False, a value head. `microbatches` is per update
    and rank.
    """
    layout, hidden, b = run.layout, arguments.transformer["hidden_size"], run.element_bytes
    row = run.row_tokens
    chunks = layout.stage_layers(arguments.transformer["num_layers"])[stage]
    last = stage == layout.pp - 1
    by_chunk = [
        chunk_activations(arguments, list(layers), run, last=last and index == len(chunks) - 1)
        for index, layers in enumerate(chunks)
    ]
    components: dict[str, float] = {}
    counts = in_flight(layout, stage, microbatches)
    for chunk, count in zip(by_chunk, counts, strict=True):
        _add(components, {name: value * row * count for name, value in chunk.saved.items()})
    if layout.pp > 1:
        components["stage outputs"] = sum(counts) * hidden * b / run.scatter * row
    # Only one chunk of a stage runs backward at a time, so the largest chunk decides.
    components["recomputed"] = max(chunk.recomputed for chunk in by_chunk) * row
    components["gradients in flight"] = max(chunk.gradients for chunk in by_chunk) * row
    components["weight gradient"] = float(largest_weight_elements * b)
    rounded = _rounded_layer_bytes(arguments.transformer, run)
    if rounded:
        sparse = [sum(is_sparse(arguments.transformer, layer) for layer in layers) for layers in chunks]
        components["rounded experts"] = rounded * _rounded_layers(sparse, counts, run)
    tower = 0.0
    if stage == 0 and arguments.vision is not None:
        components["image features"] = feature_bytes(arguments.vision, run, hidden) * counts[0]
        components["vision tower"] = tower_bytes(arguments.vision, run, trained=run.section.train_vision)
        tower = tower_bytes(arguments.vision, run, trained=False)
    if last and predicts_tokens:
        components["logits"] = _output_projection_bytes(arguments, run, microbatches)
    elif last:
        components["values"] = 4 * hidden / run.scatter * row  # hidden states in float32
    # Without gradients only one layer's tensors exist at a time, plus the hidden states that it reads and writes.
    forward = max(chunk.gradients for chunk in by_chunk) * row + 2 * hidden * b * row + rounded + tower
    return StageActivations(components, forward + (components.get("logits", 0.0) / 2))


def _rounded_layer_bytes(sizes: TransformerArguments, run: Execution) -> float:
    """Compute the bytes of the rounded copies of a layer's experts (actor.quantization_aware) on one rank."""
    if not run.section.quantization_aware or not sizes.get("num_moe_experts"):
        return 0.0
    own = sizes["num_moe_experts"] / run.layout.ep
    return own * 3 * sizes["hidden_size"] * sizes["moe_ffn_hidden_size"] / run.layout.etp * run.element_bytes


def _rounded_layers(sparse: Sequence[int], counts: Sequence[int], run: Execution) -> int:
    """Count the layers whose rounded experts exist at a time; `sparse`, `counts`: layers and micro-batches by chunk."""
    section = run.section
    if section.recompute == "full" or (section.recompute == "selective" and "moe" in section.recompute_modules):
        return min(section.recompute_layers if section.recompute == "full" else 1, max(sparse))
    return sum(layers * count for layers, count in zip(sparse, counts, strict=True))


def _output_projection_bytes(arguments: ModelArguments, run: Execution, microbatches: int) -> float:
    """Compute the bytes of the deferred output projection of one micro-batch, backward pass included. The sampling sets
    of all micro-batches of an update are on the device.

    All tokens of the row count as trained. This is an upper bound, which is tight for long responses.
    """
    hidden, b = arguments.transformer["hidden_size"], run.element_bytes
    tokens = run.row_tokens
    vocabulary = -(-arguments.vocab_size // run.layout.tp)
    chunk = min(run.section.logprob_chunk_tokens, tokens)
    tile = min(chunk * vocabulary, max(TILE_ELEMENTS["cuda" if run.cuda else "cpu"], chunk))
    row = tokens * hidden * b * 2 + tokens * 4 * 6  # gathered and selected hidden states, statistics
    gradients = tokens * hidden * 4 + vocabulary * hidden * (4 + (b if b < 4 else 0))
    masks = 0.0
    if run.masked:
        # A tile's mask with one byte per logit, and indices of 4 bytes per 8 logits; weights of listed columns, at
        # most as many as the tile has logits, and their gradients; sorted states; the sets of all tokens.
        masks = 1.5 * tile + (b + 4) * min(tile, vocabulary * hidden) + tokens * hidden * b
        masks += tokens * (max_device_bytes(arguments.vocab_size) + (microbatches - 1) * SET_BYTES * SET_TOKENS)
    # Products of the backward pass in float32 convert the weights of a tile's entries, then its hidden states.
    converted = 4 * hidden * max(tile // chunk, chunk) if run.float32_head and run.cuda and b < 4 else 0
    return row + gradients + 2 * 4 * tile + masks + converted
