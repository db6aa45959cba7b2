"""Import of transformers' AutoTokenizer without its code for models."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from transformers import AutoTokenizer

_FACTORY = "transformers.models.auto.auto_factory"
_MIXIN = "GenerationMixin"
ModelClass = TypeVar("ModelClass", bound=type)


def auto_tokenizer() -> type[AutoTokenizer]:
    """Import AutoTokenizer.

    transformers (5.19) shares a module between automatic tokenizers and models. This module imports GenerationMixin,
    and with it masks, tensor parallelism and Dynamo: 80 % of the CPU time of the import. It uses the class only for
    models with code of their own, so the class is imported at the first of those.
    """
    if _FACTORY not in sys.modules:
        _import_factory()
    from transformers import AutoTokenizer

    return AutoTokenizer


def _import_factory() -> None:
    from transformers import generation

    if _MIXIN in vars(generation):  # imported already
        return
    # The package imports its names lazily, so the name is not an attribute yet.
    setattr(generation, _MIXIN, None)
    try:
        from transformers.models.auto import auto_factory
    finally:
        delattr(generation, _MIXIN)
    add_mixin = auto_factory.add_generation_mixin_to_remote_model

    def import_and_add(model_class: ModelClass) -> ModelClass:
        setattr(auto_factory, _MIXIN, getattr(generation, _MIXIN))
        changed: ModelClass = add_mixin(model_class)
        return changed

    auto_factory.add_generation_mixin_to_remote_model = import_and_add
