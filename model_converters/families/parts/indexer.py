"""Indexer of DeepSeek's sparse attention: rows and arguments. Source: transformers models/deepseek_v32.

Every attention layer has an indexer, which scores the pairs of a query and an earlier token. Queries attend to the
index_topk tokens with the largest scores. Choices have no gradient, so the indexer is not trained. All
tensor-parallel ranks hold it whole. The names of Megatron's experimental attention (0.16.1) are kept.

| Megatron-Core: `self_attention.core_attention.indexer.` | Hugging Face: `self_attn.indexer.` | shape |
|---|---|---|
| `linear_wq_b.weight` | `wq_b.weight` | [heads * size, q_lora_rank] |
| `linear_wk.weight` | `wk.weight` | [size, hidden] |
| `k_norm.weight`, `k_norm.bias` | the same | [size] |
| `linear_weights_proj.weight` | `weights_proj.weight` | [heads, hidden] |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from model_converters.errors import ConversionError
from model_converters.families.parts.arguments import TransformerArguments
from model_converters.families.parts.family import whole_row
from model_converters.families.parts.hf_config import HFConfig, integer, require
from model_converters.mapping.table import Row
from model_converters.mapping.transforms import Shape

DEFAULTS: HFConfig = {"index_head_dim": 128, "index_topk": 2048}
"""Defaults of all families' configuration classes in transformers."""
FIELDS = frozenset({"index_head_dim", "index_n_heads", "index_topk"})
LAYER_TYPES = ("indexed_attention",)
REFUSED: HFConfig = {
    "index_topk_freq": 4,
    "index_topk_pattern": "FS",
    "indexer_types": ["full", "shared"],
    "num_indexer_layers": 1,
}
"""Fields that index_arguments rejects, with an example value."""
_MCORE, _HF = "decoder.layers.{l}.self_attention.core_attention.indexer.", "model.layers.{l}.self_attn.indexer."


def index_arguments(config: HFConfig, *, interleaved: bool) -> TransformerArguments:
    """Read the arguments of the indexer.

    interleaved: whether transformers pairs neighbouring elements of the indexer's rotated part, which is the first one;
    otherwise it pairs the elements of two halves.

    Raises: ConversionError naming a setting with which layers share an indexer, or the size that is too small.
    """
    shared = "layers that reuse the choices of another layer's indexer are not supported"
    layers = integer(config, "num_hidden_layers")
    require(config, "index_topk_freq", 1, None, reason=shared)
    require(config, "index_topk_pattern", "F" * layers, None, reason=shared)
    require(config, "indexer_types", ["full"] * layers, None, reason=shared)
    require(config, "num_indexer_layers", layers, None, reason=shared)
    pairs = "transformers does not read it, and this family's indexer pairs " + (
        "neighbouring elements" if interleaved else "the elements of two halves"
    )
    require(config, "indexer_rope_interleave", interleaved, None, reason=pairs)
    size, rotated = integer(config, "index_head_dim"), integer(config, "qk_rope_head_dim")
    if size < rotated:
        raise ConversionError(
            f"config.json: index_head_dim {size} is less than qk_rope_head_dim {rotated}, the part that is rotated"
        )
    return {
        "dsa_indexer_n_heads": integer(config, "index_n_heads"),
        "dsa_indexer_head_dim": size,
        "dsa_indexer_topk": integer(config, "index_topk"),
        "dsa_indexer_interleaved": interleaved,
    }


def index_rows(config: HFConfig, layers: Sequence[int]) -> list[Row]:
    """Return the rows of the indexers of `layers`."""
    heads, size = integer(config, "index_n_heads"), integer(config, "index_head_dim")
    hidden = integer(config, "hidden_size")

    def row(mcore: str, hf: str, shape: Shape) -> Row:
        return whole_row(_MCORE + mcore, _HF + hf, shape, layers)

    return [
        replace(row("linear_wq_b.weight", "wq_b.weight", (heads * size, integer(config, "q_lora_rank"))), fp8=True),
        replace(row("linear_wk.weight", "wk.weight", (size, hidden)), fp8=True),
        row("k_norm.weight", "k_norm.weight", (size,)),
        row("k_norm.bias", "k_norm.bias", (size,)),
        row("linear_weights_proj.weight", "weights_proj.weight", (heads, hidden)),
    ]
