"""Score extraction from a judge's answer: the last complete match within bounds, or a user's function."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mcore_rl.config.reward import JudgeConfig
from mcore_rl.errors import ConfigError
from mcore_rl.rewards.judge.answers import Reply
from mcore_rl.rewards.judge.scores import NoScoreError, Reader, score_reader
from mcore_rl.types import Prompt

PROMPT = Prompt(3, np.array([1], np.int32), "1+1=", "sums", "2", {"level": 4})
FUNCTIONS = """
def share(answer, finish_reason, data_source, ground_truth, extra_info):
    if answer == "fail":
        raise ValueError("no idea\\nat all")
    if answer == "all":
        return len(finish_reason) + len(data_source) + int(ground_truth) + extra_info["level"]
    return {"none": None, "nan": float("nan"), "text": "5", "yes": True, "many": 1e300}.get(answer, 0.5)
"""


def read(reader: Reader, text: str, finish_reason: str = "stop") -> float:
    return reader(PROMPT, Reply(text, 0, finish_reason))


@pytest.mark.parametrize(
    ("text", "score"),
    [
        *(("Score: 7", 7), ("score:\n-1.5 points", -1.5), ("I first thought Score: 3, but then: Score: 8. Done", 8)),
        ("Score: 10/10", 10),
    ],
)
def test_the_last_match_counts(text: str, score: float) -> None:
    assert read(score_reader(JudgeConfig()), text) == score


def test_without_a_match_there_is_no_score() -> None:
    for text in ("", "seven", "Score: seven", "7"):
        with pytest.raises(NoScoreError, match=r"judge\.score_pattern matches nothing"):
            read(score_reader(JudgeConfig()), text)


def test_a_score_that_may_lack_digits_is_none() -> None:
    reader = score_reader(JudgeConfig())
    with pytest.raises(NoScoreError, match=r"cut at its score 'Score: 1'; raise judge\.max_response_tokens"):
        read(reader, "Score: 3. No, Score: 1", "length")
    assert read(reader, "Score: 1", "stop") == 1
    assert read(reader, "Score: 10, because", "length") == 10


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("(.+)", "ten"), ("(nan|inf)", "nan"), ("(inf)", "inf"), (r"yes|(\d)", "3 yes"), (r"(\d*)!", "!")],
)
def test_what_is_no_finite_number_is_no_score(pattern: str, text: str) -> None:
    with pytest.raises(NoScoreError, match="is not a finite number"):
        read(score_reader(JudgeConfig(score_pattern=pattern)), text)


def test_bounds_are_part_of_what_counts() -> None:
    reader = score_reader(JudgeConfig(min_score=1, max_score=10))
    assert (read(reader, "Score: 1"), read(reader, "Score: 10")) == (1, 10)
    for text, shown in (("Score: 0.9", "0.9"), ("Score: 11", "11"), ("Score: 5, no, Score: 100", "100")):
        with pytest.raises(NoScoreError, match=f"the score {shown} is not between 1 and 10"):
            read(reader, text)


def test_a_number_that_no_reward_can_hold_is_no_score() -> None:
    for sign in ("", "-"):
        with pytest.raises(NoScoreError, match="is not between"):
            read(score_reader(JudgeConfig()), f"Score: {sign}" + "9" * 60)
    with pytest.raises(NoScoreError, match="is not a finite number"):
        read(score_reader(JudgeConfig()), "Score: " + "9" * 5000)


@pytest.fixture
def parser(functions: Path) -> str:
    return f"{functions}:share"


def test_a_users_function_sees_the_answer_and_what_is_known_of_the_prompt(parser: str) -> None:
    reader = score_reader(JudgeConfig(parser=parser))
    assert read(reader, "all", "length") == 6 + 4 + 2 + 4
    assert read(reader, "Score: 9") == 0.5
    assert read(reader, "yes") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(("fail", r"^judge\.parser raised ValueError: no idea$"), ("none", r"^judge\.parser returned None")),
        *(("nan", r"^judge\.parser returned nan"), ("text", r"^judge\.parser returned '5'")),
        ("many", r"^the score 1e\+300 is not between"),
    ],
)
def test_a_users_function_that_finds_nothing_costs_one_answer(parser: str, text: str, message: str) -> None:
    with pytest.raises(NoScoreError, match=message):
        read(score_reader(JudgeConfig(parser=parser)), text)


def test_a_users_function_that_cannot_be_called_is_refused(parser: str, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def f(answer): ...\n")
    for spec, message in (
        (parser.replace("share", "sure"), "has no function sure"),
        (f"{tmp_path}/other.py:f", r"cannot be called as f\(answer, finish_reason"),
        ("share", r"must be null or module_or_file\.py:function"),
    ):
        with pytest.raises(ConfigError, match=rf"^judge\.parser=.*{message}"):
            score_reader(JudgeConfig(parser=spec))
