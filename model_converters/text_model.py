"""Text model inside a release that also reads images: its config.json, and the names of its tensors.

A config.json without `vision_config` selects the text model; with it, the vision tower is part of the model
(vision_model.py). The release's config.json has the text model's fields in `text_config`. Its tensors are named
`model.language_model.layers.0...` instead of `model.layers.0...`; the vision tower's (`model.visual.*`) are left out.
Exports are text models, with the names and the config.json that transformers writes for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from model_converters.errors import ConversionError

T = TypeVar("T")

TEXT_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""model_type of a release -> model_type in its text_config."""
_PREFIX, _TEXT_PREFIX, _VISION_PREFIX = "model.language_model.", "model.", "model.visual."
_KEPT = ("quantization_config", "transformers_version")
"""Top-level fields that also concern the text model."""


def reads_images(config: Mapping[str, object]) -> bool:
    """Return whether config.json describes a release of which only the text model is used."""
    return config.get("model_type") in TEXT_TYPES and config.get("vision_config") is None


def text_fields(config: Mapping[str, object]) -> dict[str, object]:
    """Return config.json of the text model; of any other model, the same fields.

    Raises: ConversionError for a release without text_config, or with another kind of text model.
    """
    if not reads_images(config):
        return dict(config)
    kind, text = config["model_type"], config.get("text_config")
    wanted = TEXT_TYPES[str(kind)]
    if not isinstance(text, Mapping) or text.get("model_type") != wanted:
        raise ConversionError(f"config.json: model_type {kind!r} needs a text_config with model_type {wanted!r}")
    tied = [fields["tie_word_embeddings"] for fields in (config, text) if "tie_word_embeddings" in fields]
    if any(value != tied[0] for value in tied):
        raise ConversionError(
            "config.json: tie_word_embeddings and text_config.tie_word_embeddings differ; remove one of them"
        )
    kept = {key: config[key] for key in _KEPT if key in config}
    return {**text, **kept, **({"tie_word_embeddings": tied[0]} if tied else {})}


def text_tensors(stored: Mapping[str, T]) -> tuple[dict[str, T], list[str]]:
    """Return the text model's tensors by the names of text models, and the names of the vision tower's tensors.

    Raises: ConversionError if a tensor is stored under both names.
    """
    renamed: dict[str, T] = {}
    left_out = [name for name in stored if name.startswith(_VISION_PREFIX)]
    for name in (name for name in stored if not name.startswith(_VISION_PREFIX)):
        text_name = _TEXT_PREFIX + name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else name
        if text_name in renamed:
            raise ConversionError(f"{name} and {text_name} are two names of one tensor; remove one of them")
        renamed[text_name] = stored[name]
    return renamed, left_out
