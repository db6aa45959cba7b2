"""docs/algorithms.md is up to date with the registry."""

from __future__ import annotations

import pytest
from algorithms_page import COSTS, PAGE, page

from mcore_rl.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from mcore_rl.config.rules.presets import PRESETS
from tests.readme import ROOT


def test_algorithms_page_matches_registry() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python scripts/algorithms_page.py"


def test_algorithms_page_has_corrections_presets_and_choices() -> None:
    text = page()
    titles = ("Corrections: `algorithm.correction`", "Tokens that a loss", "Presets of corrections", "Papers")
    for title in (*titles, "Teachers: `teacher.in_advantage`", "Sampled sets: `rollout.keep_sampling_mask`"):
        assert f"\n## {title}" in text
    assert [name for name in PRESETS if f"\n| `{name}` | `algorithm.corrections=[" not in text] == []
    kinds = "{kind: mask, level: token, low: 0.5, high: 5, policy: current}"
    assert f"`algorithm.corrections=[{kinds}]` `algorithm.policy_loss.name=reinforce`" in text


def test_algorithms_page_has_the_keys_of_every_paper() -> None:
    found = {row for row in page().split("\n## Papers\n")[1].splitlines() if "`" in row}
    rows = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").splitlines()
    assert found == {f"{' | '.join(row.split(' | ')[:2])} |" for row in rows if row.startswith("| ") and "`" in row}
    assert len(found) > 60


@pytest.mark.parametrize(("loss", "cost"), [("vespo", "whole_sequence"), ("real", "whole_group"), ("ppo_clip", None)])
def test_algorithms_page_names_costs_of_default_options(loss: str, cost: str | None) -> None:
    section = page().split(f"\n### {loss}\n")[1].split("\n### ")[0]
    expected = "none" if cost is None else COSTS[cost]
    assert f"\nAdditional cost: {expected}" in section


def test_algorithms_page_has_formula_and_source_for_every_name() -> None:
    sections = page().split("\n## User-defined")[0].split("\n### ")[1:]
    assert [section.split("\n", 1)[0] for section in sections] == [*ADVANTAGES, *POLICY_LOSSES]
    for section in sections:
        assert "=" in section
        assert "Source:" in section or section.startswith("sft"), section
