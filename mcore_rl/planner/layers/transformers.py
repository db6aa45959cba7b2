"""Tensors that a layer of transformers saves (strategy fsdp2)."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_rl.planner.layers.execution import Execution, SavedTensor, core_attention
from model_converters.families.parts.arguments import TransformerArguments


def transformers_layer(sizes: TransformerArguments, run: Execution, *, sparse: bool) -> Iterator[SavedTensor]:
    """Yield the tensors of a layer of transformers."""
    hidden, b = sizes["hidden_size"], run.element_bytes
    # A norm saves its input in float32, and its output before it is multiplied by the weight.
    yield SavedTensor("norms", (4 if sizes.get("post_norms") else 2) * run.norm(hidden))
    yield SavedTensor("attention", hidden * b)
    yield from (_latent if sizes.get("multi_latent_attention") else _grouped)(sizes, run)
    if sparse:
        yield from _experts(sizes, run)
    else:
        # Input, outputs of gate and up, the activation, and the product.
        yield SavedTensor("mlp", (hidden + 4 * sizes["ffn_hidden_size"]) * b)


def _grouped(sizes: TransformerArguments, run: Execution) -> Iterator[SavedTensor]:
    heads, groups, head = sizes["num_attention_heads"], sizes["num_query_groups"], sizes["kv_channels"]
    if sizes.get("qk_layernorm"):
        yield SavedTensor("norms", (heads + groups) * run.norm(head))
    if sizes.get("qk_norm_over_heads"):
        yield SavedTensor("norms", run.norm(heads * head) + run.norm(groups * head))
    # Rotated q and k, with v; unrotated q and k are not saved.
    yield SavedTensor("attention", (heads + 2 * groups) * head * run.element_bytes)
    yield from core_attention(heads * head, heads, run)


def _latent(sizes: TransformerArguments, run: Execution) -> Iterator[SavedTensor]:
    b, heads, value = run.element_bytes, sizes["num_attention_heads"], sizes["v_head_dim"]
    query = sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"]
    # Outputs of the norms, which are inputs of the following projections.
    for rank in filter(None, (sizes.get("q_lora_rank"), sizes["kv_lora_rank"])):
        yield SavedTensor("norms", run.norm(rank))
        yield SavedTensor("attention", rank * b)
    yield SavedTensor("attention", heads * (2 * query + value) * b)
    # torch's memory-efficient kernel for CUDA accepts values of another size than keys (2.13,
    # check_head_dim_size_mem_efficient). CPUs have no fused kernel for these sizes, so attention saves the
    # probabilities.
    if run.cuda or query == value:
        yield from core_attention(heads * value, heads, run)
        return
    yield SavedTensor("core attention", heads * run.square_length * b)
    yield SavedTensor("attention", heads * value * b)


def _experts(sizes: TransformerArguments, run: Execution) -> Iterator[SavedTensor]:
    hidden, b, topk = sizes["hidden_size"], run.element_bytes, sizes["moe_router_topk"]
    yield SavedTensor("moe", hidden * b)
    scores = 9 if sizes.get("moe_router_score_function") == "sigmoid" else 5
    # Scores and map of all experts. For each chosen one: weights, its index, and the order of tokens by expert.
    yield SavedTensor("router", scores * sizes["num_moe_experts"] + 56 * topk)
    # The input and output of every chosen expert, outputs of gate and up, the activation, and the product.
    yield SavedTensor("moe", topk * (2 * hidden + 4 * sizes["moe_ffn_hidden_size"]) * b)
    if shared := sizes.get("moe_shared_expert_intermediate_size"):
        yield SavedTensor("moe", 4 * shared * b)
    if sizes.get("moe_shared_expert_gate"):
        yield SavedTensor("moe", (hidden + 1) * b)
