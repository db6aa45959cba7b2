"""Example tool: search in a text file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from mcore_rl.config.functions import load_object
from mcore_rl.rollout.tools.toolbox import ToolBox
from tests.unit.rollout.tools.made import with_tools

EXAMPLE = Path(__file__).parents[4] / "configs" / "tools"
TEXTS = [
    "The cat sat on the mat.",
    "A dog and a cat.",
    "Birds sing in the morning; the dog sleeps.",
    "",
    "Cat cat cat.",
]


def test_search_scores_follow_the_formula(tmp_path: Path) -> None:
    """Okapi BM25 written out for one word of one text: tf 3 in 3 words, 4 words on average, in 3 of 5 texts."""
    index = load_object("example", f"{EXAMPLE}/search.py:Index")(TEXTS)
    mean = (6 + 5 + 8 + 0 + 3) / 5
    weight = math.log(1 + (5 - 3 + 0.5) / (3 + 0.5))
    wanted = weight * 3 * 2.5 / (3 + 1.5 * (0.25 + 0.75 * 3 / mean))
    found = index.search("CAT?", 2)
    assert found[0] == (pytest.approx(wanted, rel=1e-12), "Cat cat cat.")
    assert index.search("dog cat", 9)[0][1] == "A dog and a cat."
    assert index.search("fish", 3) == []


def test_search_example_file_runs(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    entries = yaml.safe_load((EXAMPLE / "search.yaml").read_text())
    entries["tools"][0]["class_name"] = f"{EXAMPLE}/search.py:SearchTool"
    entries["tools"][0]["config"]["path"] = str(tmp_path / "texts.jsonl")
    (tmp_path / "search.yaml").write_text(yaml.safe_dump(entries))

    async def use(box: ToolBox) -> list[str]:
        return [(await box.call("e", "search", {"query": query})).text for query in ("morning birds", "fish")]

    assert with_tools(str(tmp_path / "search.yaml"), use) == [f"[1] {TEXTS[2]}", "Nothing was found."]
