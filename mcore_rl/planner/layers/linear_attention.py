"""Tensors that a gated delta net saves (mcore_rl/megatron/model/linear_attention/layer.py)."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_rl.planner.layers.execution import ALWAYS, Execution, SavedTensor
from mcore_rl.resolved.costs import DELTA_RULE_CHUNK
from model_converters.families.parts.arguments import TransformerArguments


def linear_attention(sizes: TransformerArguments, run: Execution) -> Iterator[SavedTensor]:
    """Yield the tensors of a layer's linear attention, without its norm and its input.

    The last two lines exist only while the layer is recomputed. They count the sequences' padding to whole chunks as
    nothing.
    """
    t, b = run.layout.tp, run.element_bytes
    heads, key, value = (
        sizes["linear_num_value_heads"] / t,
        sizes["linear_key_head_dim"],
        sizes["linear_value_head_dim"],
    )
    keys, values = sizes["linear_num_key_heads"] / t * key, heads * value
    yield SavedTensor("linear attention", (2 * keys + 2 * values + 2 * heads) * b)
    yield SavedTensor("linear attention", values * b)
    # Input and output of the convolution; queries and keys before and after their norm; the norm and gate of outputs.
    yield SavedTensor("linear attention", (2 * (2 * keys + values) + 4 * heads * key + 4 * values) * b, ALWAYS)
    # Chunks: inputs, both sides of the triangular system, five matrices of a chunk's tokens, states and outputs.
    chunks = 7 * key + 6 * value + 5 * DELTA_RULE_CHUNK + key * value / DELTA_RULE_CHUNK
    yield SavedTensor("linear attention", 4 * heads * chunks, ALWAYS)
