"""docs/algorithms.md is what the registry says now."""

from __future__ import annotations

from algorithms_page import PAGE, page

from mcore_rl.algorithms.registry import ADVANTAGES, POLICY_LOSSES


def test_the_page_is_written_from_the_registry_as_it_is() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python scripts/algorithms_page.py"


def test_every_name_has_a_formula_and_a_source() -> None:
    sections = page().split("\n### ")[1:]
    assert [section.split("\n", 1)[0] for section in sections] == [*ADVANTAGES, *POLICY_LOSSES]
    for section in sections:
        assert "=" in section
        assert "Source:" in section or section.startswith("sft"), section
