"""Consistency of docs/rewards.md with the code: tables, keys, and example functions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mcore_rl.config.reading.unknown_keys import known_keys
from mcore_rl.config.reward import GRADERS, RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.rewards.functions import Sample
from mcore_rl.rewards.graders.catalogue import SOURCES
from mcore_rl.rewards.graders.loading import load_grader
from tests.code_blocks import code_blocks

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")


def test_the_table_of_data_sources_is_the_catalogue() -> None:
    table = {}
    for line in PAGE.splitlines():
        sources, grader, *_ = [*(re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")), [], []]
        if line.startswith("|") and grader and grader[0] in GRADERS:
            table |= dict.fromkeys(sources, grader[0])
    assert table == SOURCES


def test_every_key_that_it_names_is_one() -> None:
    named = set(re.findall(r"\b(?:reward|reward_model|judge)\.[a-z_.]*[a-z]", PAGE))
    assert {name for name in named if name not in known_keys()} <= {"reward.overlong"}  # a section
    assert len(named) > 15


@pytest.mark.parametrize(("name", "manager"), [("compute_score", "prime"), ("compute_scores", "batch")])
def test_its_functions_run_as_they_stand(tmp_path: Path, name: str, manager: str) -> None:
    (block,) = (block for block in code_blocks("docs/rewards.md") if f"def {name}(" in block.text)
    (tmp_path / "my_reward.py").write_text(block.text)
    grader = load_grader(RewardConfig(function=f"{tmp_path}/my_reward.py:{name}", manager=manager), SandboxConfig())
    samples = [Sample("test", text, "72", {}) for text in ("so it is #### 72", "72")]
    scores = grader.grade(samples) if manager == "batch" else [grader.grade([sample])[0] for sample in samples]
    expected = [(0.125, {}), (1.0, {})] if manager == "batch" else [(1.0, {"format": 1.0}), (1.0, {"format": 0.0})]
    assert [(score.reward, score.parts) for score in scores] == expected
