"""`make gpu`: every file of GPU tests has a place in the order, and a stage that fails or crashes hides no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.result import BenchmarkOutcome, Machine
from tests.gpu import __main__ as command
from tests.gpu.outcomes import CRASHED, Outcome
from tests.gpu.stages import STAGES, place_of
from tests.readme import ROOT

TESTS = """
import os, pytest

@pytest.fixture
def broken_end():
    yield
    raise RuntimeError("teardown")

def test_passes(record_property):
    record_property("figure", "7 GB/s")

def test_fails():
    assert 1 == 2, "the reason"

@pytest.mark.skip(reason="needs 2 GPUs")
def test_is_skipped():
    pass

def test_ends_badly(broken_end):
    pass

def test_crashes():
    os._exit(3)

def test_is_not_reached():
    pass
"""
MACHINE = Machine("2026-11-26", "x86_64", 2, 0.0, "1", "NVIDIA H200", "580", {"torch": "2.13.0"})


def test_every_file_has_one_place_in_the_order() -> None:
    listed = [name for files in STAGES.values() for name in files]
    files = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert len(listed) == len(set(listed))
    assert files == set(listed)
    assert [place_of(name) for name in (listed[0], listed[-1], "test_other.py")] == [0, len(listed) - 1, len(listed)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a file of tests that crash, and one of tests that pass, each a stage."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_first.py").write_text(TESTS)
    (tmp_path / "test_second.py").write_text("def test_works(): pass\n")
    (tmp_path / "test_slow.py").write_text("import time\ndef test_hangs(): time.sleep(600)\n")
    stages = {"first": ("test_first.py",), "second": ("test_second.py", "test_missing.py"), "slow": ("test_slow.py",)}
    monkeypatch.setattr(command, "STAGES", stages)
    return tmp_path


def test_run_stage_crash_keeps_outcomes_and_later_stages(folder: Path) -> None:
    arguments = ["-c", str(folder / "pytest.ini"), "-p", "no:cacheprovider"]
    first, second = (command.run_stage(stage, arguments, 60, folder) for stage in ("first", "second"))
    outcomes = {outcome.test.rpartition("::")[2]: outcome for outcome in first}
    assert {name: outcome.outcome for name, outcome in outcomes.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_is_skipped": "skipped",
        "test_ends_badly": "failed",
        "test_crashes": "failed",
    }
    assert outcomes["test_passes"].figures == ("7 GB/s",)
    assert "the reason" in outcomes["test_fails"].reason
    assert outcomes["test_is_skipped"].reason == "needs 2 GPUs"
    assert outcomes["test_crashes"].reason == CRASHED
    assert [outcome.outcome for outcome in second] == ["passed"]
    lines = command.summary({"first": first, "second": second})
    assert lines[0].startswith("first: 1 passed, 3 failed, 1 skipped")
    assert lines[2].startswith("first failure: ")
    assert "test_fails" in lines[2]


def test_run_stage_hanging_test_ends_at_the_limit(folder: Path) -> None:
    [outcome] = command.run_stage("slow", ["-c", str(folder / "pytest.ini"), "-p", "no:cacheprovider"], 15, folder)
    assert (outcome.outcome, outcome.reason) == ("failed", CRASHED)
    [outcome] = command.run_stage("slow", [], 0, folder)
    assert (outcome.outcome, "--minutes" in outcome.reason) == ("failed", True)


def test_main_writes_one_file_after_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"devices": Outcome("test_a", "passed", 2.0, figures=("1 GB/s",)), "vllm": Outcome("test_b", "failed", 1.0)}
    monkeypatch.setattr(command, "run_stage", lambda stage, *_: [found[stage]] if stage in found else [])
    monkeypatch.setattr(command, "run_benchmark", lambda name: BenchmarkOutcome(name, reason="none", skipped=True))
    monkeypatch.setattr(command, "look", lambda gpu: MACHINE)
    path, written = tmp_path / "gpu.json", []
    save = command.Session.save
    monkeypatch.setattr(command.Session, "save", lambda self: (save(self), written.append(read(path)))[1])
    assert command.main(["--json", str(path)]) == 1
    assert len(written) == len(STAGES) + 1
    assert "tests" in written[0]
    assert [(each["stage"], each["test"], each["outcome"], each["seconds"]) for each in written[-1]["tests"]] == [
        ("devices", "test_a", "passed", 2.0),
        ("vllm", "test_b", "failed", 1.0),
    ]
    assert written[-1]["tests"][0]["figures"] == ["1 GB/s"]
    assert (written[-1]["device"], written[-1]["versions"]) == ("NVIDIA H200", {"torch": "2.13.0"})
    assert len(written[-1]["benchmarks"]) >= 6
    assert command.main(["--stages", "devices", "--json", str(path)]) == 0


def read(path: Path) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads(path.read_text())
    return found
