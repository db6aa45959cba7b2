"""The value head: one row that replaces the output projection and has the name of transformers' classification models.

| mcore | HF |
|---|---|
| `output_layer.weight` [1, h] | `score.weight` of token and sequence classification with one label |

A causal model has no value head: its trunk is loaded, its `lm_head` is ignored, and the head is newly initialised.
"""

from __future__ import annotations

import re

from model_converters.errors import ConversionError
from model_converters.families import family_for
from model_converters.families.parts.family import whole_row
from model_converters.families.parts.hf_config import HFConfig, integer
from model_converters.families.parts.mtp import resolve_mtp, without_mtp
from model_converters.hf.io import HFCheckpoint
from model_converters.mapping.table import Row

VALUE_HEAD, SCORE = "output_layer.weight", "score.weight"
"""The head's name in Megatron's model and in HF checkpoints."""
_BIAS, _VOCABULARY = "score.bias", "lm_head.weight"
_TASK = re.compile(r"(For[A-Z]\w*|LMHeadModel)$")
"""Task at the end of the name of a class of transformers."""


def value_model_config(config: HFConfig) -> dict[str, object]:
    """Return the configuration of the value model: no tied embeddings and no multi-token prediction."""
    return {**without_mtp(config), "tie_word_embeddings": False}


def model_rows(config: HFConfig, *, has_value_head: bool) -> list[Row]:
    """Return the family's table, with `has_value_head` for a value model; `config` is then from value_model_config."""
    rows = family_for(config).rows(config)
    return with_value_head(rows, config) if has_value_head else rows


def classifier_config(config: HFConfig) -> dict[str, object]:
    """Return the config.json of an export as transformers' sequence classification with one label."""
    named = config.get("architectures")
    names = named if isinstance(named, list) else []
    classes = [_TASK.sub("ForSequenceClassification", str(name)) for name in names]
    labels: dict[str, object] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**config, **labels, **({"architectures": classes} if classes else {})}


def with_value_head(rows: list[Row], config: HFConfig) -> list[Row]:
    """Replace the row of the output projection by the row of the value head; `rows` are for value_model_config."""
    head = whole_row(VALUE_HEAD, SCORE, (1, integer(config, "hidden_size")), place="head")
    return [head if row.mcore == VALUE_HEAD else row for row in rows]


def resolve_value_head(checkpoint: HFCheckpoint, *, required: bool = False) -> tuple[list[Row], tuple[str, ...]]:
    """Decide how a checkpoint fills a value model.

    Returns: the rows that the checkpoint fills (without the head's row if it has no value head), and the names of its
    tensors to drop, for load_tensors.

    Raises: ConversionError for a head with several labels or a non-zero bias, and for a missing head if `required`.
    """
    _, dropped = resolve_mtp(checkpoint.config, checkpoint.shapes, keep=False)
    config = value_model_config(checkpoint.config)
    rows = with_value_head(checkpoint.family.rows(config), config)
    score = checkpoint.shapes.get(SCORE)
    if score is None and required:
        raise ConversionError(f"{SCORE} is missing: the model must have the score head of a one-label classifier")
    if score is None:
        rows = [row for row in rows if row.mcore != VALUE_HEAD]
    elif score[0] != 1:
        raise ConversionError(f"{SCORE} has {score[0]} labels; a value head has one")
    elif _BIAS in checkpoint.shapes and bool(checkpoint.read(_BIAS).any()):
        # transformers adds a bias, initially zero, to token classification heads. It shifts all values equally.
        raise ConversionError(f"{_BIAS} is not zero: value heads with a bias are not supported")
    # A bias of zero and the output projection of a causal model have no place in the value model.
    optional = (name for name in (_BIAS, _VOCABULARY) if name in checkpoint.shapes)
    return rows, (*dropped, *optional)
