"""Multi-token-prediction (MTP) layers: rows, and the decision whether to keep them.

Names of MTP layer m of a model with L decoder layers. HF stores a copy of the tensors shared with the main model:

| mcore | HF |
|---|---|
| `mtp.layers.{m}.enorm`, `.hnorm`, `.eh_proj` | `model.layers.{L+m}.enorm`, `.hnorm`, `.eh_proj` |
| `mtp.layers.{m}.transformer_layer.*` | `model.layers.{L+m}.*`, a decoder layer |
| `mtp.layers.{m}.final_layernorm` | `model.layers.{L+m}.shared_head.norm` |
| `embedding.word_embeddings` | `model.layers.{L+m}.embed_tokens`, equal to `model.embed_tokens` |
| `output_layer` | `model.layers.{L+m}.shared_head.head`, equal to `lm_head` |

Qwen3-Next and Qwen3.5 store one layer, without copies, under `mtp.` (see SEPARATE).

Source: megatron.core.transformer.multi_token_prediction (0.16.1); the tensor names of DeepSeek-V3, GLM-4.5 and Qwen3.5.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from model_converters.errors import ConversionError
from model_converters.families.parts.family import embedding_rows, whole_row
from model_converters.families.parts.hf_config import HFConfig, flag, integer
from model_converters.mapping.table import BoundRow, Row

_KEY = "num_nextn_predict_layers"
_KEYS = (_KEY, "mtp_num_hidden_layers")
"""Spellings of the number of MTP layers in config.json; Qwen3.5 has the second."""
_SEPARATE_PREFIX = "mtp."
Copies = Literal["equal", "main"]
"""Treatment of MTP copies of embedding and head that differ from the main model's tensors; megatron-core shares one
tensor. equal: reject them. main: ignore the copies."""


@dataclass(frozen=True)
class MTPNames:
    """HF names of a layer's own tensors, in which {layer} is L + m, and whether HF stores copies of shared tensors.

    decoder: prefix of the tensors of its decoder layer.
    """

    embedding_norm: str = "model.layers.{layer}.enorm"
    hidden_norm: str = "model.layers.{layer}.hnorm"
    projection: str = "model.layers.{layer}.eh_proj"
    final_norm: str = "model.layers.{layer}.shared_head.norm"
    decoder: str = "model.layers.{layer}."
    copies: bool = True


SEPARATE = MTPNames(
    embedding_norm=f"{_SEPARATE_PREFIX}pre_fc_norm_embedding",
    hidden_norm=f"{_SEPARATE_PREFIX}pre_fc_norm_hidden",
    projection=f"{_SEPARATE_PREFIX}fc",
    final_norm=f"{_SEPARATE_PREFIX}norm",
    decoder=f"{_SEPARATE_PREFIX}layers.0.",
    copies=False,
)
"""Names of Qwen3-Next and Qwen3.5, which have at most one layer."""


def num_mtp_layers(config: HFConfig) -> int:
    """Read the number of MTP layers.

    Raises: ConversionError.
    """
    return max(integer(config, key, default=0, minimum=0) for key in _KEYS)


def without_mtp(config: HFConfig) -> dict[str, object]:
    """Return the configuration of the same model without MTP layers."""
    return {**config, **{key: 0 for key in _KEYS if integer(config, key, default=0, minimum=0)}}


def resolve_mtp(
    config: HFConfig, hf_names: Iterable[str], *, keep: bool = True
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Keep the MTP layers if the checkpoint has their tensors and `keep` is set; otherwise drop them.

    Returns: the configuration of the matching table, and the names of the dropped tensors, for check_complete.
    If the checkpoint has only some of the tensors, the layers are kept and check_complete reports the missing ones.
    With num_nextn_predict_layers 0 the checkpoint's MTP layers are dropped.
    """
    first, names = integer(config, "num_hidden_layers"), list(hf_names)
    count = num_mtp_layers(config)
    # An explicit 0 states that the stored layers are unwanted; an absent field does not.
    if not count and config.get(_KEY) == 0:
        count = _num_stored(names, first)
    # Names under mtp. cannot be decoder layers: they are dropped even if config.json does not count them.
    prefixes = (_SEPARATE_PREFIX, *(f"model.layers.{first + depth}." for depth in range(count)))
    found = tuple(name for name in names if name.startswith(prefixes))
    if found and keep and num_mtp_layers(config):
        return dict(config), ()
    return without_mtp(config), found


def _num_stored(names: Sequence[str], first: int) -> int:
    """Count the stored MTP layers from `first` on, recognised by eh_proj, which decoder layers do not have."""
    projected = {name.removesuffix(".eh_proj.weight") for name in names if name.endswith(".eh_proj.weight")}
    return next(depth for depth in itertools.count() if f"model.layers.{first + depth}" not in projected)


def resolve_copies(
    bound: Sequence[BoundRow], hf_names: Collection[str], copies: Copies = "equal"
) -> tuple[list[BoundRow], tuple[str, ...]]:
    """Decide on the MTP copies of embedding and head, which some releases (GLM-4.6) lack.

    Copies that are absent, or all copies with `copies` "main", are replaced by the main model's tensors.

    Returns: the table that the checkpoint fills, and the names of the dropped copies, for check_complete.
    """
    stored = [row for row in bound if row.row.repeats not in ("", row.hf[0])]
    replaced = [row.hf[0] for row in stored if copies == "main" or row.hf[0] not in hf_names]
    resolved = [_own_tensor(row) if row.hf[0] in replaced else row for row in bound]
    return resolved, tuple(name for name in replaced if name in hf_names)


def _own_tensor(bound: BoundRow) -> BoundRow:
    # copy_of_embedding: the last stage loads its own copy of the main model's tensor, which is not exported again.
    hf = (bound.row.repeats,)
    return replace(bound, row=replace(bound.row, hf=hf, copy_of_embedding=True), hf=hf)


def mtp_rows(config: HFConfig, layer_rows: Sequence[Row], names: MTPNames = MTPNames()) -> list[Row]:
    """Return the rows of all MTP layers; `layer_rows` are the rows of any one decoder layer.

    Raises: ConversionError for copies of tied embeddings, which no released model has.
    """
    count = num_mtp_layers(config)
    if count and names.copies and flag(config, "tie_word_embeddings"):
        raise ConversionError(
            f"config.json: tie_word_embeddings with {_KEY} {count} is not supported; set {_KEY} to 0 to drop the "
            "layers (conversions: --drop-mtp)"
        )
    first = integer(config, "num_hidden_layers")
    return [row for depth in range(count) for row in _rows_of_depth(config, layer_rows, names, depth, first + depth)]


def _rows_of_depth(config: HFConfig, layer_rows: Sequence[Row], names: MTPNames, depth: int, layer: int) -> list[Row]:
    hidden = integer(config, "hidden_size")
    mcore, copies = f"mtp.layers.{depth}.", f"model.layers.{layer}."

    def hf(name: str) -> str:
        return f"{name}.weight".replace("{layer}", str(layer))

    # Megatron shares both tensors with the main model: the copies get rows that repeat them.
    embedding, _, head = embedding_rows(config)
    projection = whole_row(f"{mcore}eh_proj.weight", hf(names.projection), (hidden, 2 * hidden), place="mtp")
    decoder = names.decoder.replace("{layer}", str(layer))
    rows = [
        whole_row(f"{mcore}enorm.weight", hf(names.embedding_norm), (hidden,), place="mtp"),
        whole_row(f"{mcore}hnorm.weight", hf(names.hidden_norm), (hidden,), place="mtp"),
        replace(projection, axis="tp", split_by="hidden_size", whole_in_engines=True),
        *(_moved(row, f"{mcore}transformer_layer.", decoder) for row in layer_rows),
        whole_row(f"{mcore}final_layernorm.weight", hf(names.final_norm), (hidden,), place="mtp"),
    ]
    if not names.copies:
        # Without the tensor's first stage, the last stage loads its own copy. The output projection is there anyway.
        return [replace(_repeated(embedding, embedding.hf[0]), copy_of_embedding=True), *rows]
    embedding_copy = _repeated(embedding, f"{copies}embed_tokens.weight")
    return [embedding_copy, *rows, _repeated(head, f"{copies}shared_head.head.weight")]


def _repeated(row: Row, hf: str) -> Row:
    return replace(row, hf=(hf,), place="mtp", repeats=row.hf[0])


def _moved(row: Row, mcore: str, hf: str) -> Row:
    """Rename a decoder layer's row to an MTP layer."""
    return replace(
        row,
        mcore=row.mcore.replace("decoder.layers.{l}.", mcore),
        hf=tuple(name.replace("model.layers.{l}.", hf) for name in row.hf),
        stored=tuple(replace(part, name=part.name.replace("model.layers.{l}.", hf)) for part in row.stored),
        place="mtp",
        layers=(),
    )
