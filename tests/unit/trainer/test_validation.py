"""Validation metrics of sets and data sources compared with means of their rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mcore_rl.trainer.validation import describe_validation, part_accuracies, validation_parts


def result(num_prompts: int, samples: int = 2) -> Any:
    """Responses whose accuracy, reward and parts are functions of their index."""
    places = np.arange(num_prompts * samples)
    return SimpleNamespace(
        group_ids=places // samples,
        accuracies=(places % 3 == 0).astype(np.float32),
        rewards=places.astype(np.float32),
        response_tokens=(places + 1).astype(np.int32),
        scores={"judge": places * 2.0},
        parts={"format": np.where(places % 2 == 0, 1.0, np.nan), "absent": np.full(len(places), np.nan)},
        errors=((1, "raised"),),
    )


def test_describe_validation_each_source_has_the_mean_of_its_rows() -> None:
    sources = ["openai/gsm8k", "aime", "openai/gsm8k", "aime", "aime"]
    graded, parts = result(5), validation_parts({"": sources})
    metrics = describe_validation(graded, parts)
    of_row = np.repeat(np.array(sources), 2)
    for source in set(sources):
        rows = of_row == source
        assert metrics[f"val/accuracy/{source}"].value == pytest.approx(graded.accuracies[rows].mean())
        assert metrics[f"val/reward/{source}"].value == pytest.approx(graded.rewards[rows].mean())
        assert metrics[f"val/response_tokens/{source}"].value == pytest.approx(graded.response_tokens[rows].mean())
        assert metrics[f"val/judge/{source}"].value == pytest.approx(graded.scores["judge"][rows].mean())
        assert metrics[f"val/format/{source}"].value == 1.0
        assert part_accuracies(graded, parts)[source] == pytest.approx(graded.accuracies[rows].mean())
    assert metrics["val/accuracy"].value == pytest.approx(graded.accuracies.mean())
    assert not [name for name in metrics if name.startswith("val/absent/")]


def test_validation_parts_sets_sources_and_both_have_names() -> None:
    parts = validation_parts({"easy": ["a", "b"], "hard": ["b", "b"]})
    assert {name: rows.tolist() for name, rows in parts.rows.items()} == {
        "easy": [0, 1],
        "hard": [2, 3],
        "a": [0],
        "b": [1, 2, 3],
        "easy/a": [0],
        "easy/b": [1],
    }
    assert parts.notes == ()


def test_validation_parts_source_named_as_a_set_leaves_the_name_to_the_set() -> None:
    same = validation_parts({"gsm8k": ["gsm8k", "gsm8k"], "aime": ["aime"]})
    assert {name: rows.tolist() for name, rows in same.rows.items()} == {"gsm8k": [0, 1], "aime": [2]}
    assert same.notes == ()
    other = validation_parts({"gsm8k": ["gsm8k"], "mixed": ["gsm8k", "aime"]})
    assert other.rows["gsm8k"].tolist() == [0]
    assert other.rows["mixed/gsm8k"].tolist() == [1]
    assert len(other.notes) == 1
    assert "val/accuracy/gsm8k" in other.notes[0]


def test_validation_parts_rows_without_a_source_add_no_metric() -> None:
    assert validation_parts({"": ["unknown"] * 3}).rows == {}
    assert set(validation_parts({"": ["unknown", "a"]}).rows) == {"unknown", "a"}
    assert validation_parts({}).rows == {}


def test_validation_parts_odd_sources_get_distinct_names_on_one_line() -> None:
    sources = ["math 500\n(hard)", "math_500_(hard)", "数学", "/", "\x00", "a" * 300, "openai/gsm8k"]
    parts = validation_parts({"": sources})
    assert list(parts.rows) == [
        "math_500_(hard)",
        "math_500_(hard)~2",
        "数学",
        "_",
        "_~2",
        "a" * 100,
        "openai/gsm8k",
    ]
    assert [rows.tolist() for rows in parts.rows.values()] == [[place] for place in range(len(sources))]
    assert all(name.isprintable() for name in parts.rows)
    assert len(parts.notes) == 5
