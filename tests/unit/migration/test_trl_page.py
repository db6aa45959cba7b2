"""Agreement of the TRL section of the migration page with TRL, if it is installed, and with our keys."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.config.catalogue import find_keys
from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.rewards.functions import Sample
from mcore_rl.rewards.graders.loading import load_grader
from tests.code_blocks import block_that_begins
from tests.readme import ROOT

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Settings of TRL")[2].partition("\n## ")[0]
PEER = next((ROOT / ".venv-trl" / "lib").glob("python3*/site-packages"), None)
"""Installed packages of the peer; None without scripts/setup_trl.sh."""


def rows(columns: int) -> list[list[str]]:
    """Return the cells of the section's table rows with this number of columns, without headers."""
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line[:1] == "|"]
    return [row for row in table if len(row) == columns and row[0] not in {"TRL", "---"}]


def settings_of_trl() -> Iterator[tuple[str, str | None]]:
    """Yield the arguments of GRPOTrainer, and the fields of GRPOConfig and its bases with their defaults."""
    assert PEER is not None
    for name in ("transformers/training_args.py", "trl/trainer/base_config.py", "trl/trainer/grpo_config.py"):
        for node in ast.walk(ast.parse((PEER / name).read_text(encoding="utf-8"))):
            match node:
                case ast.AnnAssign(target=ast.Name(id=field), value=ast.Call(keywords=keywords)):
                    default = next((word.value for word in keywords if word.arg == "default"), None)
                    yield field, ast.unparse(default).strip("'") if default is not None else None
                case ast.AnnAssign(target=ast.Name(id=field), value=ast.Constant(value=value)):
                    yield field, str(value)
    trainer = ast.parse((PEER / "trl/trainer/grpo_trainer.py").read_text(encoding="utf-8"))
    kind = next(node for node in trainer.body if isinstance(node, ast.ClassDef) and node.name == "GRPOTrainer")
    creation = next(node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    yield from ((argument.arg, None) for argument in creation.args.args)


def test_defaults_of_our_keys_are_those_of_the_schema() -> None:
    ours = {entry.key: str(entry.default) for entry in find_keys()}
    stated = {key.strip("`"): default for _, _, key, default in rows(4) if key.startswith("`")}
    assert len(stated) >= 6
    assert stated == {key: ours.get(key) for key in stated}


@pytest.mark.skipif(PEER is None, reason="needs .venv-trl: scripts/setup_trl.sh")
def test_names_and_defaults_are_those_of_trl() -> None:
    theirs = dict(settings_of_trl())
    named = {name for row in rows(2) for name in re.findall(r"`(\w+)`", row[0])}
    assert len(named) > 40
    assert sorted(named - theirs.keys()) == []
    stated = {name.strip("`"): default for name, default, *_ in rows(4)}
    assert stated == {name: theirs[name] for name in stated}


def test_wrapper_calls_a_function_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trl_reward.py").write_text(block_that_begins("docs/migration.md", "# trl_reward.py"))
    (tmp_path / "my_rewards.py").write_text(
        "def accuracy(completions, answer, **kwargs):\n"
        "    return [float(text[0]['content'] == right) for text, right in zip(completions, answer)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reward = RewardConfig(function=f"{tmp_path}/trl_reward.py:compute_scores", manager="batch")
    grader = load_grader(reward, SandboxConfig())
    scores = grader.grade([Sample("test", text, "72", {}) for text in ("72", "7")])
    assert [score.reward for score in scores] == [1.0, 0.0]
