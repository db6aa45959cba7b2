"""docs/benchmarks.md has the recorded results of benchmarks/results/."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks_page import PAGE, RESULTS, Record, newest, page

from benchmarks.registry import BENCHMARKS


def write(folder: Path, name: str, date: str, *rows: dict[str, object]) -> Record:
    outcome = {"benchmark": "plan", "results": rows}
    (folder / name).write_text(json.dumps({"machine": f"{date}  a GPU", "benchmarks": [outcome]}))
    return Record.read(folder / name)


def row(name: str, ours: float, limit: float, ratio: float, aim: str = "") -> dict[str, object]:
    return {"name": name, "ours": ours, "limit": limit, "unit": "s", "ratio": ratio, "aim": aim, "met": True}


def test_benchmarks_page_matches_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python scripts/benchmarks_page.py"


def test_section_of_every_recorded_benchmark_names_file_and_command() -> None:
    sections = dict(re.findall(r"^## (\w+): ((?:.*\n)+?)(?=^## |\Z)", page(), flags=re.MULTILINE))
    recorded = {
        outcome["benchmark"]
        for path in RESULTS.glob("*.json")
        for outcome in json.loads(path.read_text()).get("benchmarks", ())
        if outcome["results"]
    }
    assert set(sections) == recorded <= set(BENCHMARKS)
    for name, text in sections.items():
        assert f"    make bench ARGS={name}\n" in text
        (source,) = re.findall(r"`(benchmarks/results/[\w.-]+)`", text)
        assert (RESULTS / Path(source).name).is_file()


def test_newest_result_is_shown_and_of_one_day_the_longest(tmp_path: Path) -> None:
    old = write(tmp_path, "z.json", "2026-01-01", row("a", 1, 2, 0.5), row("b", 1, 2, 0.5))
    short = write(tmp_path, "y.json", "2026-01-02", row("a", 1, 2, 0.5))
    long = write(tmp_path, "x.json", "2026-01-02", row("a", 1, 2, 0.5), row("b", 1, 2, 0.5))
    assert newest([old, short, long], "plan") == long
    assert newest([old, short, long], "driver") is None


@pytest.mark.parametrize(
    ("result", "cells"),
    [
        (row("slower", 3, 2, 1.5, "<= 1.2"), "| slower | 3.000 s | 2.000 s | 1.500 | <= 1.2 | **no** |"),
        (row("speed-up", 2, 6, 3, ">= 2"), "| speed-up | 2.000 s | 6.000 s | (3.000) | >= 2 | yes |"),
        (row("no aim", 2, 8, 0.25), "| no aim | 2.000 s | 8.000 s | 0.250 |  |  |"),
    ],
)
def test_row_shows_direction_of_ratio_and_missed_aim(tmp_path: Path, result: dict[str, object], cells: str) -> None:
    """The aim is compared anew: the file's own verdict is true in all three."""
    write(tmp_path, "x.json", "2026-01-02", result)
    assert cells in page(tmp_path)
    assert "2026-01-02 a GPU; `benchmarks/results/x.json`." in page(tmp_path)


def test_losses_on_stale_data_have_a_table_over_seeds(tmp_path: Path) -> None:
    runs = [
        {"steps": 20, "accuracy": [0.1, 0.5, after], "staleness_mean": 3.0, "staleness_max": 4.0, "seconds": 60.0}
        for after in (0.3, 0.4)
    ]
    for day, found in ((1, runs[:1]), (2, runs)):  # the second file has continued the first one
        contents = {"machine": f"2026-01-0{day}  a CPU", "losses_on_stale_data": {"gspo_corrected": found}}
        (tmp_path / f"2026-01-0{day}-cpu-losses-think2.json").write_text(json.dumps(contents))
    assert "| gspo_corrected | 2 | 20 | 0.100 | 0.350 ± 0.071 | 0.500 | 3.000 | 4 |" in page(tmp_path)
    assert "Task think2: 2026-01-02 a CPU" in page(tmp_path)
    assert "2026-01-01 a CPU" not in page(tmp_path)
