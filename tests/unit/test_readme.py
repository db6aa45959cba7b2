"""Settings, files and recipes that the README and its pages name. tests/e2e/test_readme.py runs their commands."""

from __future__ import annotations

import re

import pytest

from mcore_rl.config import load_config
from tests.readme import ROOT, files, readme, settings


@pytest.mark.parametrize("given", settings(readme()), ids=" ".join)
def test_every_setting_is_a_key_and_takes_the_value(given: list[str]) -> None:
    load_config(str(ROOT / "configs" / "gsm8k_cpu.yaml"), ["data.train=train.jsonl", *given])


def test_every_file_is_there() -> None:
    named = files(readme())
    assert {"docs/families.md", "configs/demo_cpu.yaml", "scripts/setup_trl.sh"} <= set(named)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_recipe_of_the_table_is_a_file() -> None:
    recipes = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+\.yaml`[^|]*)\|", recipes, flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(named) > 10
    assert [name for name in named if not (ROOT / "configs" / name).is_file()] == []
