"""Files of models that read images: the fields of the text model in config.json, and the names of tensors.

| form | fields of the text model | model_type |
|---|---|---|
| file of transformers 5, and the hub's | in `text_config` | of the whole model; `text_config` has its own |
| older files of Qwen2.5-VL | top level | of the whole model |
| flat: here and in weight tables | top level | of the whole model |

`vision_config` stays nested. Files that this package writes have the first form.

Tensors are named `model.language_model.*` and `model.visual.*`; Qwen2.5-VL's files have `model.*` and `visual.*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from model_converters.errors import ConversionError
from model_converters.text_model import TEXT_TYPES, reads_images

T = TypeVar("T")

VISION_TYPES = {
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_5": TEXT_TYPES["qwen3_5"],
    "qwen3_5_moe": TEXT_TYPES["qwen3_5_moe"],
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
"""model_type of a model with a vision tower -> model_type in its text_config."""
_TEXT, _TIED = "text_config", "tie_word_embeddings"
_OUTER = frozenset(
    {
        *("architectures", "model_type", "quantization_config", "transformers_version", "vision_config"),
        *("image_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id", "vision_token_id"),
    }
)
"""Fields that are not the text model's."""
_SHARED = frozenset({"dtype", "torch_dtype", _TIED})
"""Fields of the whole model that inference engines read from the text model's."""


def flat_fields(config: Mapping[str, object]) -> dict[str, object]:
    """Return config.json in the flat form; of a model without vision tower, also of a release whose text model is used
    alone (text_model.py), the same fields.

    Raises: ConversionError for another kind of text model, and if the two objects disagree on tied embeddings.
    """
    text = config.get(_TEXT)
    if reads_images(config):
        return dict(config)
    if config.get("model_type") not in VISION_TYPES or text is None:
        return dict(config)
    kind = str(config["model_type"])
    if not isinstance(text, Mapping) or text.get("model_type", VISION_TYPES[kind]) != VISION_TYPES[kind]:
        raise ConversionError(
            f"config.json: model_type {kind!r} needs a text_config with model_type {VISION_TYPES[kind]!r}"
        )
    # transformers reads the outer field, engines the inner one.
    tied = config.get(_TIED, False)
    if text.get(_TIED, tied) != tied:
        raise ConversionError(
            f"config.json: tie_word_embeddings is {tied}, but text_config.tie_word_embeddings {text[_TIED]}; make them "
            "equal"
        )
    outer = {key: value for key, value in config.items() if key in _OUTER | _SHARED}
    inner = {key: value for key, value in text.items() if key not in _OUTER}
    return {**inner, **outer, _TIED: tied}


def nested_fields(config: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a file from the flat form; of a model without vision tower, the same fields."""
    kind = config.get("model_type")
    if kind not in VISION_TYPES or _TEXT in config:
        return dict(config)
    outer = {key: value for key, value in config.items() if key in _OUTER | _SHARED}
    text = {key: value for key, value in config.items() if key not in _OUTER}
    return {**outer, _TEXT: {**text, "model_type": VISION_TYPES[str(kind)]}}


def nested_overrides(config: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """Return overrides of the flat `config` at their places in a nested file; of a model without
    vision tower, the same fields."""
    if config.get("model_type") not in VISION_TYPES:
        return dict(overrides)
    outer = {key: value for key, value in overrides.items() if key in _OUTER}
    text = {key: value for key, value in overrides.items() if key not in _OUTER}
    return {**outer, **({_TEXT: text} if text else {})}


_MODEL, _LANGUAGE, _VISUAL = "model.", "model.language_model.", "model.visual."


def tower_tensors(stored: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of a model with vision tower by their names in weight tables.

    Raises: ConversionError if a tensor is stored under both of its names.
    """
    renamed: dict[str, T] = {}
    for name, tensor in stored.items():
        known = _table_name(name)
        if known in renamed:
            raise ConversionError(f"{name} and another tensor are both named {known}; remove one of them")
        renamed[known] = tensor
    return renamed


def _table_name(name: str) -> str:
    if name.startswith("visual."):
        return f"{_MODEL}{name}"
    if name.startswith(_MODEL) and not name.startswith((_LANGUAGE, _VISUAL)):
        return _LANGUAGE + name.removeprefix(_MODEL)
    return name
