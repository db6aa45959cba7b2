"""Text model inside a release that also reads images: its config.json, and the names of its tensors.

The release's config.json has the text model's fields in `text_config`. Its tensors have other names than the text
model's, and tensors that only images need are left out:

| text model | Qwen3.5 | Gemma 3, Kimi-K2.5 |
|---|---|---|
| `model.layers.0...` | `model.language_model.layers.0...` | `language_model.model.layers.0...` |
| left out | `model.visual.*` | `vision_tower.*`, `multi_modal_projector.*`, `mm_projector.*` |

With `vision_config` in config.json, Qwen3.5's vision tower is part of the model instead (vision_model.py).
Kimi-K2.5 and K2.6 have the model_type `kimi_k25`. Their settings of INT4 weights are in `text_config`.
Exports are text models, with the names and the config.json that transformers writes for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from model_converters.errors import ConversionError

T = TypeVar("T")

TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "kimi_k25": "kimi_k2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""model_type of a release -> model_type in its text_config."""
_ALSO_WRITTEN = {"kimi_k25": "deepseek_v3"}
"""model_type of a release -> the one that transformers writes into text_config instead, for the same model."""
_WITH_TOWER = ("qwen3_5", "qwen3_5_moe")
"""Releases whose vision tower can be trained."""
_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
"""Start of the names of a text model's tensors in a release -> the same in a text model."""
_VISION_PREFIXES = ("model.visual.", "vision_tower.", "multi_modal_projector.", "mm_projector.")
_IN_EITHER = ("quantization_config", "tie_word_embeddings")
"""Fields of the text model that are outside of text_config, inside, or both."""


def reads_images(config: Mapping[str, object]) -> bool:
    """Return whether config.json describes a release of which only the text model is used."""
    kind = config.get("model_type")
    return kind in TEXT_TYPES and (kind not in _WITH_TOWER or config.get("vision_config") is None)


def text_fields(config: Mapping[str, object]) -> dict[str, object]:
    """Return config.json of the text model; of any other model, the same fields.

    Raises: ConversionError for a release without text_config, with another kind of text model, or with two settings of
    tied embeddings or quantisation.
    """
    if not reads_images(config):
        return dict(config)
    kind, text = config["model_type"], config.get("text_config")
    wanted = TEXT_TYPES[str(kind)]
    if not isinstance(text, Mapping) or text.get("model_type") not in (wanted, _ALSO_WRITTEN.get(str(kind), wanted)):
        raise ConversionError(f"config.json: model_type {kind!r} needs a text_config with model_type {wanted!r}")
    found = {**text, **{key: config[key] for key in ("transformers_version",) if key in config}}
    for key in _IN_EITHER:
        values = [fields[key] for fields in (config, text) if fields.get(key) is not None]
        if any(value != values[0] for value in values):
            raise ConversionError(f"config.json: {key} and text_config.{key} differ; remove one of them")
        if values:
            found[key] = values[0]
    return found


def text_tensors(stored: Mapping[str, T]) -> tuple[dict[str, T], list[str]]:
    """Return the text model's tensors by the names of text models, and the names of the vision tower's tensors.

    Raises: ConversionError if a tensor is stored under both names.
    """
    renamed: dict[str, T] = {}
    left_out = [name for name in stored if name.startswith(_VISION_PREFIXES)]
    for name in (name for name in stored if not name.startswith(_VISION_PREFIXES)):
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        text_name = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        if text_name in renamed:
            raise ConversionError(f"{name} and {text_name} are two names of one tensor; remove one of them")
        renamed[text_name] = stored[name]
    return renamed, left_out
