"""Every setting of config.json either gives the model of transformers or is rejected by name."""

from __future__ import annotations

import logging

import pytest
import torch

from model_converters.errors import ConversionError
from model_converters.families import FAMILIES
from model_converters.vision_model import VISION_TYPES
from tests.selection import on_demand_unless
from tests.unit.converters.config_grid import changes, facts_of_ours, facts_of_transformers, grid_fields

# Models with a vision tower read the text model's fields by the functions of text models.
KINDS = sorted(name for name, family in FAMILIES.items() if not family.transformers_type and name not in VISION_TYPES)
ON_DEMAND = ("ernie4_5_moe", "glm_moe_dsa", "minimax_m2", "qwen3_5_text", "qwen3_5_moe_text")
"""The arguments of the last two are read by the functions of another family, qwen3_next."""


def _named(change: dict[str, object], message: str) -> bool:
    """Return whether the message names the changed field or the object that contains it."""
    inside = {key for value in change.values() if isinstance(value, dict) for key in value}
    words = {
        *change,
        *inside,
        *(("rope type", "rope scaling") if {"rope_parameters", "rope_scaling"} & set(change) else ()),
    }
    return any(word in message for word in words)


def _differences(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    found = []
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            same = value.shape == ours[name].shape and torch.allclose(value, ours[name], rtol=1e-5)
        elif isinstance(value, float):
            same = ours[name] == pytest.approx(value, rel=1e-6)
        else:
            same = ours[name] == value
        found += [] if same else [f"{name}: {ours[name]} instead of {value}"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=on_demand_unless(kind not in ON_DEMAND)) for kind in KINDS])
def test_family_every_setting_matches_transformers_or_is_rejected(kind, caplog):
    caplog.set_level(logging.CRITICAL)
    problems, accepted, tested = [], 0, set()
    for change in changes(kind):
        fields = grid_fields(kind, change)
        if repr(fields) in tested:  # such as a removed field that this model does not have
            continue
        tested.add(repr(fields))
        try:
            ours = facts_of_ours(fields)
        except ConversionError as error:
            if not _named(change, str(error)):
                problems.append(f"{change}: refused as {error}")
            continue
        except Exception as error:
            problems.append(f"{change}: {error!r}")
            continue
        accepted += 1
        try:
            theirs = facts_of_transformers(fields)
        except Exception as error:
            problems.append(f"{change}: transformers refuses it: {str(error)[:200]}")
            continue
        problems += [f"{change}: {difference}" for difference in _differences(ours, theirs)]
    assert not problems, "\n".join(problems)
    assert accepted > 30  # a grid of rejected settings would prove little
