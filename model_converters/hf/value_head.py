"""The value head: one row in the place of the vocabulary's, under the name of transformers' classification models.

| mcore | HF |
|---|---|
| `output_layer.weight` [1, h] | `score.weight` of token and sequence classification with one label |

A causal model has none: its trunk is loaded, its `lm_head` is left out, and the head starts anew.
"""

from __future__ import annotations

from typing import Any

from model_converters.errors import ConversionError
from model_converters.families.parts.hf_config import HFConfig, integer
from model_converters.families.parts.mtp import resolve_mtp, without_mtp
from model_converters.hf.io import HFCheckpoint
from model_converters.mapping.table import Row
from model_converters.mapping.transforms import Same

VALUE_HEAD = "output_layer.weight"
_SCORE, _BIAS, _VOCABULARY = "score.weight", "score.bias", "lm_head.weight"


def value_model_config(config: HFConfig) -> dict[str, Any]:
    """The configuration of the value model: nothing of it is tied to the embedding, and it predicts no tokens."""
    return {**without_mtp(config), "tie_word_embeddings": False}


def with_value_head(rows: list[Row], config: HFConfig) -> list[Row]:
    """The rows of a family for value_model_config, with the head's in the place of the vocabulary projection's."""
    head = Row(
        mcore=VALUE_HEAD,
        hf=(_SCORE,),
        shapes=((1, integer(config, "hidden_size")),),
        transform=Same(),
        place="head",
    )
    return [head if row.mcore == VALUE_HEAD else row for row in rows]


def resolve_value_head(checkpoint: HFCheckpoint, *, required: bool = False) -> tuple[list[Row], tuple[str, ...]]:
    """The rows that the checkpoint can fill, without the head's where it has none, and its tensors that are dropped on
    purpose, for load_tensors.

    Raises: ConversionError for a head of several labels, one with a bias that is not zero, or none where it is
    `required`.
    """
    _, dropped = resolve_mtp(checkpoint.config, checkpoint.shapes, keep=False)
    config = value_model_config(checkpoint.config)
    rows = with_value_head(checkpoint.family.rows(config), config)
    score = checkpoint.shapes.get(_SCORE)
    if score is None and required:
        raise ConversionError(f"there is no score head ({_SCORE}), as sequence classification with one label has it")
    if score is None:
        rows = [row for row in rows if row.mcore != VALUE_HEAD]
    elif score[0] != 1:
        raise ConversionError(f"{_SCORE} has {score[0]} labels; a value head has one")
    elif _BIAS in checkpoint.shapes and bool(checkpoint.read(_BIAS).any()):
        # transformers gives heads of token classification one, zero at the start; it moves all values alike.
        raise ConversionError(f"{_BIAS} is not zero, and value heads have no bias here")
    optional = (name for name in (_BIAS, _VOCABULARY) if name in checkpoint.shapes)
    return rows, (*dropped, *optional)
