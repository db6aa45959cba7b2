"""Conversion of values without JSON equivalent, for models and records."""

from __future__ import annotations

import json
import math
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from mcore_rl.data.json_text import as_json_text, to_plain


class Colour(Enum):
    RED = "red"


@dataclass
class Point:
    x: Any


class Model(BaseModel):
    x: int


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array(["a", None], object), ["a", None]),
        (np.datetime64("2024-01-02T03:04:05.000000000"), "2024-01-02T03:04:05.000000000"),
        (torch.tensor([1.5]), [1.5]),
        (torch.tensor(2), 2),
        (Decimal("3"), 3),
        (Decimal("0.5"), 0.5),
        (Decimal("0.10000000000000000001"), "0.10000000000000000001"),
        (Decimal("NaN"), None),
        (Fraction(1, 3), "1/3"),
        (math.nan, None),
        (np.float64("nan"), None),
        (-math.inf, "-Infinity"),
        (datetime(2024, 1, 2, 3, tzinfo=UTC), "2024-01-02T03:00:00+00:00"),
        (date(2024, 1, 2), "2024-01-02"),
        (timedelta(days=1), "1 day, 0:00:00"),
        (b"text", "text"),
        (b"\xff", "/w=="),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Path("a/b"), "a/b"),
        (Colour.RED, "red"),
        (Point(np.int64(1)), {"x": 1}),
        (Model(x=1), {"x": 1}),
        ({1}, [1]),
        ((1, (2,)), [1, [2]]),
        ({np.int64(7): 1, None: 2, True: 3, (1, 2): 4}, {"7": 1, "null": 2, "true": 3, "[1, 2]": 4}),
        (None, None),
    ],
)
def test_to_plain_value_at_any_depth_is_json(value: Any, plain: Any) -> None:
    assert to_plain(value) == plain
    assert json.loads(as_json_text({"a": [value]})) == {"a": [plain]}
    assert "np." not in as_json_text({"a": [value]})


def test_as_json_text_string_stays_and_nan_alone_is_named() -> None:
    assert [as_json_text(value) for value in ("é", math.nan, np.float32("nan"), math.inf, "é".encode())] == [
        *("é", "NaN", "NaN", "Infinity", "é"),
    ]
    assert as_json_text({"é": 1.0}) == '{"é": 1.0}'
