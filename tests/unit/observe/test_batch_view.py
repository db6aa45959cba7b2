"""Responses of a batch in a terminal: hostile texts, parts, errors, and batches larger than a screen."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from mcore_rl.observe.batch_view import ERROR_CHARS, MAX_GROUPS, MAX_SAMPLES, RESPONSE_CHARS, print_batch


def record(group: int = 0, sample: int = 0, **changes: Any) -> dict[str, Any]:
    """A record as rollout.results writes it."""
    return {
        "prompt": "1+1=",
        "response": "2",
        "reward": 1.0,
        "accuracy": 1.0,
        "tokens": 2,
        "finish_reason": "stop",
        "group": group,
        "sample": sample,
        "version": 0,
        "versions": [[0, 0, 2]],
        "submitted_version": 0,
        "ground_truth": "2",
        "error": None,
        "turns": 1,
        "tool_calls": 0,
        "digest": 7,
        **changes,
    }


def printed(*records: dict[str, Any]) -> list[str]:
    file = io.StringIO()
    print_batch(records, Console(file=file, width=60, force_terminal=True, color_system=None))
    return file.getvalue().splitlines()


def test_print_batch_shows_prompt_once_per_group() -> None:
    assert printed(record(), record(sample=1, reward=0.25, response="3")) == [
        "group 0",
        "    prompt: 1+1=",
        "    ground truth: 2",
        "  sample 0  reward 1  accuracy 1  tokens 2  finish_reason stop  turns 1  tool_calls 0",
        "    response: 2",
        "  sample 1  reward 0.25  accuracy 1  tokens 2  finish_reason stop  turns 1  tool_calls 0",
        "    response: 3",
        "2 responses in 1 group, 2 shown",
        "mean: reward 0.625  accuracy 1  tokens 2",
    ]


def test_print_batch_parts_and_scores_have_values_and_means() -> None:
    judge = [{"text": "good \x1b[2J", "score": 7.0}]
    lines = printed(
        record(overlong=-0.5, judge=judge, scores={"judge": 7.0, "model": 0.5}), record(sample=1, scores={"judge": 3.0})
    )
    assert "    overlong: -0.5" in lines
    # The judge's answer and its score have different names.
    assert any(line.startswith("    judge: [{'text': 'good ") for line in lines)
    assert "    judge score: 7" in lines
    assert "    model score: 0.5" in lines
    assert lines[-1] == "mean: reward 1  accuracy 1  tokens 2  overlong -0.5  judge score 5  model score 0.5"


def test_print_batch_hostile_texts_stay_on_their_line() -> None:
    lines = printed(record(prompt="a\nsample 9  reward 1", response="\x1b[2J\u202e[red]\r\ud83d", error="e\x07\nf"))
    assert "    prompt: a↵sample 9  reward 1" in lines
    assert "    response: U+001B[2JU+202E[red]↵U+D83D" in lines
    assert "    error: eU+0007↵f" in lines
    # Names of parts come from graders and data, too.
    assert "    p\x1b: 1" not in printed(record(**{"p\x1b": 1}))
    assert "    pU+001B: 1" in printed(record(**{"p\x1b": 1}))


def test_print_batch_counts_errors_most_frequent_first() -> None:
    errors = ["late", "none", "late", *(f"other {n}" for n in range(6))]
    lines = printed(*(record(sample=n, error=error) for n, error in enumerate(errors)), record(group=1))
    place = lines.index("10 responses in 2 groups, 9 shown")
    assert lines[place + 2] == "error of 2 responses: late"
    assert lines[-1] == "and 3 other errors"


def test_print_batch_long_texts_and_many_groups_are_cut() -> None:
    long = record(response="x" * 100_000, error="y" * 100_000)
    records = [record(group, sample) for group in range(MAX_GROUPS + 3) for sample in range(MAX_SAMPLES + 1)]
    lines = printed(long, *records[1:])
    total = (MAX_GROUPS + 3) * (MAX_SAMPLES + 1)
    assert f"{total} responses in {MAX_GROUPS + 3} groups, {MAX_GROUPS * MAX_SAMPLES} shown" in lines
    assert sum(line.startswith("group ") for line in lines) == MAX_GROUPS
    assert sum(line.startswith("  sample ") for line in lines) == MAX_GROUPS * MAX_SAMPLES
    assert max(map(len, lines)) < max(RESPONSE_CHARS, ERROR_CHARS) + 100


def test_print_batch_empty_batch_has_a_summary() -> None:
    assert printed() == ["0 responses in 0 groups, 0 shown"]


def test_print_batch_foreign_values_do_not_fail() -> None:
    lines = printed({}, {"group": None, "reward": "high", "response": 3, "scores": [1], "prompt": ["a"]})
    assert "    response: 3" in lines
    assert lines[-1] == "2 responses in 1 group, 2 shown"
