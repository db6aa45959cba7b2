"""The report in Chromium: no console errors, filters, and clicks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.browser.report_page import ReportPage
from tests.recorded_run import CONFIG, groups, response, write_run

Open = Callable[..., ReportPage]
BACKGROUNDS = "return [...document.querySelectorAll('.token')].map((each) => each.style.backgroundColor)"


@pytest.fixture(scope="module")
def opened(open_report: Open, tmp_path_factory: pytest.TempPathFactory) -> ReportPage:
    """A report about 3 steps with 2 groups of 4 responses, half of them right; step 3 has 4 special responses."""
    special = [
        response(7, 0, error="the grader raised", response="needle in step 3"),
        response(7, 1, finish_reason="length", tokens=99),
        response(7, 2, tool_calls=2, judge=[{"text": "I like it", "score": 0.5}], reward=5.0),
        response(7, 3, digest=77, mask=[1, 0, 1], versions=[[1, 0, 1], [2, 2, 3]], tokens=3),
    ]
    rollouts = {"step_1": groups(), "step_2": groups(), "step_3": [*groups(), *special], "val_step_3": groups(1)}
    directory = write_run(tmp_path_factory.mktemp("report") / "run", rollouts)
    (directory / "tokens").mkdir()
    values = {"digest": 77, "token_ids": [5, 6, 7], "logp_rollout": [-0.5, -1], "logp_policy": [-0.1, -1]}
    (directory / "tokens" / "step_3.jsonl").write_text(json.dumps(values) + "\n")
    return open_report(directory)


@pytest.fixture
def page(opened: ReportPage) -> Iterator[ReportPage]:
    yield opened
    assert opened.errors() == []


def test_page_shows_charts_timeline_and_responses(page: ReportPage) -> None:
    page.script("window.scrollTo(0, 0)")
    page.wait(lambda: page.all("#charts .uplot"))
    assert {"Reward", "Accuracy fraction", "Entropy nats"} <= set(page.texts("#charts h3"))
    page.wait(lambda: page.all("#timeline-canvas") and page.all("#rates-canvas"))
    assert page.found() == "1 to 28 of 28 responses; the report has 32 of the run's 32"
    assert "0.600 (step 3)" in page.texts("#runs pre")[0]


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({"result": "right"}, 14),
        ({"result": "wrong"}, 14),
        ({"kind": "validation"}, 4),
        ({"kind": "all"}, 32),
        ({"step": "2"}, 8),
        ({"step": "3", "group": "7"}, 4),
        ({"group": "1", "result": "right"}, 6),
        ({"error": True}, 1),
        ({"truncated": True}, 1),
        ({"tools": True}, 1),
        ({"tokens_recorded": True}, 1),
        ({"text": "NEEDLE"}, 1),
        ({"text": "prompt 0"}, 12),
        ({"text": "absent"}, 0),
        ({"error": True, "truncated": True}, 0),
    ],
    ids=str,
)
def test_filters_select_the_responses(page: ReportPage, filters: dict[str, str | bool], count: int) -> None:
    assert f" of {count} responses" in page.filter(**filters)
    assert len(page.all("#list .item")) == min(count, 30)


def test_order_puts_the_highest_first(page: ReportPage) -> None:
    page.filter(order="highest reward")
    assert "reward 5" in page.texts("#list .item")[0]
    page.filter(order="longest")
    assert "99 tokens" in page.texts("#list .item")[0]


def test_next_shows_the_rest_of_the_list(page: ReportPage) -> None:
    page.filter(kind="all")
    page.click("#next")
    page.wait(lambda: page.found().startswith("31 to 32 of 32"))
    assert len(page.all("#list .item")) == 2
    page.click("#previous")
    page.wait(lambda: page.found().startswith("1 to 30"))


def test_slider_changes_the_step_and_group_button_filters(page: ReportPage) -> None:
    page.set("#step-range", 2)
    page.wait(lambda: page.texts("#step-number") == ["2"])
    page.wait(lambda: page.texts("#groups button") == ["2/4", "2/4"])
    page.click("#of-step")
    page.wait(lambda: " of 8 responses" in page.found())
    page.click("#groups button", 1)
    page.wait(lambda: " of 4 responses" in page.found())
    assert all("step 2, group 1, " in text for text in page.texts("#list .item summary b"))


def test_click_on_a_chart_selects_its_step(page: ReportPage) -> None:
    page.set("#step-range", 3)
    page.hover("#charts .u-over")
    page.click("#charts .u-over")
    # The middle of steps 0 to 3.
    page.wait(lambda: page.texts("#step-number")[0] in {"1", "2"})


def test_timeline_names_the_span_under_the_mouse(page: ReportPage) -> None:
    # Two rows of 20 pixels and an axis of 22: the driver is in the first row, and updates after 4 of 9 seconds.
    page.hover("#timeline-canvas", below_center=-20)
    page.wait(lambda: page.texts("#hint") == ["driver: update, 5 s"] or page.texts("#hint") == ["driver: rollout, 4 s"])


def test_response_shows_judge_and_facts(page: ReportPage) -> None:
    page.filter(tools=True)
    body = page.open_response().text
    assert "Judge, answer 1: score 0.5\nI like it" in body
    assert "tool_calls 2" in body


def test_tokens_are_colored_in_three_ways(page: ReportPage) -> None:
    page.filter(tokens_recorded=True)
    page.open_response()
    # The engine's log-probability is lower; not trained; both are equal.
    first, masked, equal = page.script(BACKGROUNDS)
    assert (first, masked) == ("rgba(60, 110, 220, 0.75)", "")
    assert equal.endswith(", 0)")
    assert "difference -0.4 nats, version 1" in str(page.all(".token")[0].get_attribute("title"))
    for mode, distinct in (("weight version", 3), ("loss mask", 2)):
        page.set(".body select", mode)
        assert len(set(page.script(BACKGROUNDS))) == distinct


def test_theme_button_inverts_the_colors(page: ReportPage) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    before = page.script(background)
    page.click("#theme")
    assert page.script(background) != before
    page.click("#theme")
    assert page.script(background) == before


def test_several_runs_are_overlaid_with_their_differences(open_report: Open, tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    two = write_run(tmp_path / "two", {"step_1": groups(3)}, config=CONFIG.replace("steps: 4", "steps: 9"))
    page = open_report(one, two)
    page.wait(lambda: page.all("#charts .uplot"))
    page.wait(lambda: {"one: val/accuracy", "two: val/accuracy"} <= set(page.texts("#charts .u-label")))
    assert page.texts("#config > .scroll tbody tr") == ["trainer.steps49"]
    page.set("#run", 1)
    page.wait(lambda: " of 12 responses" in page.found())
    assert page.errors() == []


@pytest.mark.parametrize("has_metrics", [True, False])
def test_run_without_responses_opens(open_report: Open, tmp_path: Path, has_metrics: bool) -> None:
    run = write_run(tmp_path / "run", {})
    if not has_metrics:
        for name in ("metrics.jsonl", "timeline.json"):
            (run / name).unlink()
    page = open_report(run)
    assert page.found() == "0 to 0 of 0 responses; the report has 0 of the run's 0"
    assert page.errors() == []


def test_page_on_a_phone_has_no_horizontal_scrolling(open_report: Open, tmp_path: Path) -> None:
    page = open_report(write_run(tmp_path / "run", {"step_1": [response(response="x" * 5000)]}), width=500)
    page.open_response()
    assert page.script("return document.documentElement.scrollWidth <= innerWidth")
