"""Answers of `mcore-rl init`: flags, a terminal, and invalid values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.errors import ConfigError
from mcore_rl.starter.answers import QUESTIONS, Question, collect


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Flags that answer the required questions; the others are not given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "train.jsonl").touch()
    return {**{question.name: None for question in QUESTIONS}, "model": "model", "train": "train.jsonl"}


def typed(*lines: str) -> tuple[Callable[[Question], str], list[str]]:
    """Return a reader of these lines, and the list to which it adds the names of the questions."""
    left, asked = list(lines), list[str]()

    def read(question: Question) -> str:
        asked.append(question.name)
        return left.pop(0)

    return read, asked


def test_collect_without_terminal_uses_defaults(flags: dict[str, str | None]) -> None:
    answers = collect(flags, None, print)
    assert (answers.val, answers.algorithm, answers.reward, answers.positions) == ("", "grpo", "math", 4096)


def test_collect_without_terminal_names_the_missing_flags(flags: dict[str, str | None]) -> None:
    flags |= {"model": None, "train": None}
    with pytest.raises(ConfigError, match=r"terminal only; set --model and --train$"):
        collect(flags, None, print)


def test_collect_asks_only_what_no_flag_answers(flags: dict[str, str | None]) -> None:
    read, asked = typed("", "dapo")
    answers = collect(flags | {"reward": "gsm8k"}, read, print)
    assert asked == ["val", "algorithm"]
    assert (answers.val, answers.algorithm, answers.reward) == ("", "dapo", "gsm8k")


def test_collect_asks_again_after_an_invalid_answer(flags: dict[str, str | None]) -> None:
    read, asked = typed("absent", " model ", "", "grpo", "math")
    shown: list[str] = []
    assert collect(flags | {"model": None}, read, shown.append).model == "model"
    assert asked == ["model", "model", "val", "algorithm", "reward"]
    assert [line.partition(":")[0] for line in shown] == ["model.hf_path=absent"]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("model", "absent", r"model\.hf_path=absent: no config\.json there"),
        ("train", "absent.jsonl", r"data\.train: there is no file absent\.jsonl"),
        ("val", "model", r"data\.val"),
        ("algorithm", "ppo2", "--algorithm=ppo2 must be one of grpo, dapo, gspo"),
        ("reward", "maths", "--reward=maths must be one of math, "),
        ("reward", "absent.py:score", r"--reward=absent\.py:score: there is no file absent\.py"),
        ("train", "$ABSENT/x", "--train=.* ABSENT is not set"),
    ],
)
def test_collect_invalid_flag_is_rejected_before_questions(
    flags: dict[str, str | None], flag: str, value: str, message: str
) -> None:
    read, asked = typed()
    with pytest.raises(ConfigError, match=message):
        collect(flags | {flag: value}, read, print)
    assert asked == []
