"""Families of text models with a vision tower: table, arguments and description."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from model_converters.families.parts.arguments import ModelArguments, TransformerArguments
from model_converters.families.parts.family import Family
from model_converters.families.parts.hf_config import HFConfig
from model_converters.families.parts.vision import (
    OWN_FIELDS,
    language_rows,
    read_sections,
    read_vision,
    without_sections,
)
from model_converters.mapping.table import Row


def with_tower(
    text: Family,
    model_type: str,
    architecture: str,
    *,
    tower: Callable[[HFConfig], list[Row]],
    sections: Sequence[int],
    interleaved: bool,
    models: str,
    covers: str,
    vllm_cpu: str,
    refused_by_engines: Mapping[str, str] = MappingProxyType({}),
    check_sglang: Callable[[HFConfig], None] = lambda config: None,
) -> Family:
    """Return the family of `text` with a vision tower.

    tower: function that returns the tower's rows. sections, interleaved: see tower_arguments. models, covers, vllm_cpu:
    see Description.
    """
    return replace(
        text,
        model_type=model_type,
        build_rows=partial(tower_table, text, tower),
        build_arguments=partial(tower_arguments, text, sections, interleaved=interleaved),
        architecture=architecture,
        own_fields=text.own_fields | OWN_FIELDS,
        vllm_imports=("torchvision",),
        refused_by_engines=refused_by_engines,
        check_sglang=check_sglang,
        description=replace(text.description, models=models, covers=covers, vllm_cpu=vllm_cpu),
    )


def tower_table(text: Family, tower: Callable[[HFConfig], list[Row]], config: HFConfig) -> list[Row]:
    """Return the weight table: the rows of `text` under the names of its decoder in this model, then the rows of
    the tower."""
    return [*language_rows(text.build_rows(config)), *tower(config)]


def tower_arguments(text: Family, sections: Sequence[int], config: HFConfig, *, interleaved: bool) -> ModelArguments:
    """Return the arguments of the model.

    sections: default of mrope_section in transformers. interleaved: see parts/vision.py.

    Raises: ConversionError.
    """
    arguments = text.build_arguments(without_sections(config))
    rotated = int(arguments.transformer["kv_channels"] * arguments.rotary.fraction)
    rotation: TransformerArguments = {"mrope_section": read_sections(config, sections, rotated // 2)}
    if interleaved:
        rotation["mrope_interleaved"] = True
    return replace(arguments, transformer={**arguments.transformer, **rotation}, vision=read_vision(config))
