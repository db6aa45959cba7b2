"""Texts of models in the report: they appear as text, whatever they contain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.report_page import ReportPage
from tests.recorded_run import CONFIG, response, write_run

Open = Callable[..., ReportPage]

HOSTILE = {
    "closing_tag": "</script><script>window.attacked = 1</script>",
    "comment": "<!-- <script> --> <!--<script>",
    "image": "<img src=x onerror='window.attacked = 1'>",
    "template": "${window.attacked = 1} {{BLOCKS}} {{SCRIPT}}",
    "entities": "&lt;b&gt; &amp; &#0;",
    "replacement": "$& $1 $` \\u003c \\",
    "surrogate": "half \ud83d pair",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_shown_as_text(open_report: Open, tmp_path: Path, name: str) -> None:
    text = HOSTILE[name]
    record = response(prompt=text, response=text, error=text, judge=[{"text": text, "score": text}], **{text: text})
    run = write_run(tmp_path / "run", {}, config=CONFIG + f"note: {json.dumps(text)}\n")
    (run / "rollouts" / "step_1.jsonl").write_text(json.dumps(record) + "\n")
    page = open_report(run)
    page.open_response()
    shown = text.replace("\ud83d", "U+D83D")
    assert page.texts("#list .body pre")[:3] == [shown] * 3
    assert shown in page.texts("#list .body td")
    assert page.script("return window.attacked") is None
    assert page.all("main img") + page.all("main script") == []
    assert page.errors() == []


def test_hidden_controls_are_named_instead_of_applied(open_report: Open, tmp_path: Path) -> None:
    text = "user\u202e\u2066 // admin \u2069\u200bעברית \x1b[31m"
    page = open_report(write_run(tmp_path / "run", {"step_1": [response(response=text)]}))
    page.open_response()
    assert page.texts("#list .body pre")[1] == "userU+202EU+2066 // admin U+2069U+200Bעברית U+001B[31m"
    assert page.errors() == []


def test_response_of_10_mb_opens_shortened(open_report: Open, tmp_path: Path) -> None:
    page = open_report(write_run(tmp_path / "run", {"step_1": [response(response="x" * 10_000_000)]}))
    page.open_response()
    shown = page.texts("#list .body pre")[1]
    assert "characters are left out" in shown
    assert len(shown) < 25_000
    assert page.errors() == []
