"""docs/algorithms.md is up to date with the registry."""

from __future__ import annotations

from algorithms_page import PAGE, page

from mcore_rl.algorithms.registry import ADVANTAGES, POLICY_LOSSES


def test_algorithms_page_matches_registry() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python scripts/algorithms_page.py"


def test_algorithms_page_has_formula_and_source_for_every_name() -> None:
    sections = page().split("\n### ")[1:]
    assert [section.split("\n", 1)[0] for section in sections] == [*ADVANTAGES, *POLICY_LOSSES]
    for section in sections:
        assert "=" in section
        assert "Source:" in section or section.startswith("sft"), section
