"""Contents of a report, for complete, running, damaged and unknown run directories."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from mcore_rl import cli
from mcore_rl.errors import ConfigError
from mcore_rl.observe.report.pages import decode
from mcore_rl.observe.report.write import write_report
from tests.recorded_run import CONFIG, groups, metrics_line, response, write_run
from tests.unit.observe.report.pages_of import alerts_of, blocks_of, run_of


def event(name: str, **values: object) -> str:
    """Return a line of timeline.json: the name of process 1, or a span of it."""
    kind = "M" if name == "process_name" else "X"
    return json.dumps({"name": name, "ph": kind, "ts": 1, "dur": 2, "pid": 1, **values}) + ",\n"


def test_report_complete_run_has_all_parts(tmp_path: Path) -> None:
    blocks = blocks_of(write_run(tmp_path / "run"))
    (run,) = blocks["summary"]["runs"]
    assert (run["name"], run["last_step"], run["total_steps"]) == ("run", 3, 4)
    assert run["series"]["steps"] == [0, 1, 2, 3]
    assert run["series"]["values"]["val/accuracy"] == [0.0, 0.2, 0.4, 0.6]
    assert run["responses"]["steps"] == [1, 2, 3]
    assert run["timeline"] == [0, 1, 2, 3]
    assert blocks["run0.groups2"] == [[0, 4, 2], [1, 4, 2]]
    assert sum(len(blocks[page[0]]) for page in run["responses"]["pages"]) == 24
    assert "0.600 (step 3)" in run["table"]


def test_report_timeline_of_step_has_its_spans_only(tmp_path: Path) -> None:
    extent, processes, *spans = blocks_of(write_run(tmp_path / "run"))["run0.spans2"]
    assert extent == [0, 9000]
    assert processes == ["driver", "rollout engine 0"]
    # Process, lane, name, start and duration in ms.
    assert [0, 0, "update", 4000, 5000] in spans
    assert sorted(span[2] for span in spans) == ["generate", "rollout", "update"]


def test_report_loads_nothing_and_contains_no_text_of_models(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    directory = write_run(
        tmp_path / "run", {"step_1": [response(prompt=hostile, response=hostile, **{hostile: hostile})]}
    )
    text = write_report([directory]).read_text()
    assert "alert(1)" not in text
    assert "default-src 'none'" in text
    # The namespace and home page that the plotting library names are no requests.
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    assert blocks_of(directory)["run0.responses0"][0]["response"] == hostile


def test_report_several_runs_lists_differing_keys(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a" / "run")
    two = write_run(tmp_path / "b" / "run", config=CONFIG.replace("steps: 4", "steps: 9") + "reward: {new_key: 1}\n")
    summary = blocks_of(one, two)["summary"]
    assert [run["name"] for run in summary["runs"]] == ["a/run", "b/run"]
    assert summary["differences"] == [["trainer.steps", [4, 9]], ["reward.new_key", [None, 1]]]


def test_report_leaves_out_values_of_the_environment(tmp_path: Path) -> None:
    config = CONFIG + "slurm: {environment: {TOKEN_OF_ME: hunter2}}\n"
    run = run_of(write_run(tmp_path / "run", config=config))
    assert run["config"]["slurm.environment"] == "['TOKEN_OF_ME']"
    assert "hunter2" not in json.dumps(run)


def test_report_run_in_progress_ignores_the_line_being_written(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(metrics_line(4)[:40])
    run = run_of(directory)
    assert run["last_step"] == 3
    assert not any("metrics.jsonl" in alert["text"] for alert in run["alerts"])


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("metrics.jsonl", metrics_line(1) + "{cut\n[1]\n" + metrics_line(2), "not JSON objects are left out (2)"),
        ("metrics.jsonl", '{"reward/mean": 1}\n' + metrics_line(2), "a line without a step"),
        ("rollouts/step_2.jsonl", json.dumps(response()) + "\n" + '{"response": "cu\n', "step_2.jsonl: lines that are"),
        ("config.yaml", "trainer: [", "config.yaml cannot be read"),
        ("config.yaml", CONFIG + "own: &own {key: *own}\n", "config.yaml cannot be read"),
        ("config.yaml", CONFIG + "own: &own [*own]\n", "config.yaml cannot be read"),
        ("config.yaml", CONFIG.replace("nowhere", "x" * 300), "File name too long"),
        ("config.yaml", CONFIG + "future: {key: 1}\n", "this version cannot read config.yaml"),
        ("timeline.json", "[\n{cut", None),
        ("timeline.json", '{"name": "step 1", "ph": "X", "ts": 1, "dur": 2, "pid": 1}\n', None),
        ("timeline.json", '{"name": "process_name", "ph": "M", "pid": [], "args": 1}\n[1, "X"]\n', None),
        ("timeline.json", '{"name": "step 1", "ph": "M", "pid": 1}\n', None),
        ("timeline.json", '{"name": "step 1", "ph": "X", "ts": "a", "dur": "b", "pid": 1}\n', None),
        ("timeline.json", event("process_name", args={"name": "driver"}) + event("step 1", dur=10**400), None),
        ("timeline.json", event("process_name", args={"name": "driver"}) + event(f"step {'9' * 5000}"), None),
        ("metrics.jsonl", metrics_line(2, time__step=1e308, reward__mean=-1e308), "not finite: reward/mean, time/step"),
        ("rollouts", None, "rollouts/ cannot be read: Not a directory"),
    ],
)
def test_report_damaged_file_is_named_and_rest_shown(
    tmp_path: Path, name: str, text: str | None, named: str | None
) -> None:
    directory = write_run(tmp_path / "run")
    if text is None:
        shutil.rmtree(directory / name)
    (directory / name).write_text(text or "")
    alerts = alerts_of(directory)
    assert named is None or any(named in alert for alert in alerts), alerts
    assert run_of(directory)["last_step"] in (2, 3)


def test_report_runs_with_values_that_json_lacks_are_compared(tmp_path: Path) -> None:
    """Values of YAML: infinity, a date, bytes, a set, and an integer that Python does not format."""
    odd = f"odd: {{inf: .inf, day: 2026-01-01, bytes: !!binary aGk=, set: !!set {{a}}, long: 0x{'f' * 5000}}}\n"
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", config=CONFIG + odd)]
    found = {key: values[1] for key, values in blocks_of(*runs)["summary"]["differences"]}
    assert (found["odd.inf"], found["odd.day"], found["odd.bytes"]) == ("inf", "2026-01-01", "b'hi'")
    assert found["odd.long"].startswith("0xffff")


def test_report_token_values_beyond_floats_are_unknown(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", {"step_1": [response(digest=1)]})
    (directory / "tokens").mkdir()
    line = {"digest": 1, "token_ids": [5], "logp_rollout": [10**400], "logp_policy": [-0.5]}
    (directory / "tokens" / "step_1.jsonl").write_text(json.dumps(line) + "\n")
    (values,) = blocks_of(directory)["run0.tokens1"]
    assert (values["engine"], values["trainer"]) == ([None], [-0.5])


def test_report_values_of_other_types_are_ignored(tmp_path: Path) -> None:
    odd = response(tokens="many", accuracy=None, group=[1], mask="x", versions=None, digest=[], tool_calls={"a": []})
    directory = write_run(tmp_path / "run", {"step_1": [odd], "step_2": [{}], "val_step_2": groups(1)})
    line = json.dumps({"step": 4, "new/text": "x", "new/list": [1], "new/flag": True, "big": 10**400, "nan": None})
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    run = run_of(directory)
    assert {"new/text", "new/list", "new/flag"}.isdisjoint(run["series"]["values"])
    assert "not finite: big, nan" in [alert["text"] for alert in run["alerts"]]
    assert [page[1:4] for page in run["responses"]["pages"]] == [[1, False, 1], [2, False, 1], [2, True, 4]]


@pytest.mark.parametrize(("name", "message"), [("missing", "is not a directory"), ("empty", "is no run")])
def test_report_other_directory_exits_with_2(
    tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert cli.main(["report", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "run.dir" in error
    assert error.count("\n") == 1


def test_report_out_names_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "run")
    assert cli.main(["report", str(directory), "--out", str(tmp_path / "r.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'r.html'}\n"
    assert not (directory / "report.html").exists()
    os.mkfifo(tmp_path / "pipe")
    for path in ("nowhere/r.html", "", "pipe", "x" * 300):
        with pytest.raises(ConfigError, match="--out FILE"):
            write_report([directory], tmp_path / path)
    assert (tmp_path / "pipe").is_fifo()


def test_report_out_that_is_a_link_replaces_its_target(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "r.html")
    write_report([write_run(tmp_path / "run")], tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "r.html").read_text().startswith("<!")


def test_report_signs_of_collapse_and_failures_are_alerts(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    lines = [metrics_line(1), metrics_line(2, actor__entropy=0.05, reward__errors=3, engine__restarts=0)]
    (directory / "metrics.jsonl").write_text("".join(lines))
    (directory / "earlier" / "1").mkdir(parents=True)
    alerts = {alert["text"].split(":")[0]: alert["step"] for alert in run_of(directory)["alerts"]}
    assert alerts["entropy fell from 2 to 0.05"] == 2
    assert alerts["reward/errors"] == 2
    assert "engine/restarts" not in alerts
    assert alerts["the run was resumed"] is None


def test_report_failure_of_the_run_is_the_first_alert(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run")
    (directory / "failure.txt").write_text("trainer rank 1 died")
    page = write_report([directory]).read_text()
    block = re.findall(r'data-block="summary">([^<]*)<', page)[0]
    summary = decode(block)
    assert isinstance(summary, dict)
    assert summary["runs"][0]["alerts"][0] == {"step": None, "text": "the run failed: trainer rank 1 died"}
