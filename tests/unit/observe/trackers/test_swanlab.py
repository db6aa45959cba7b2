"""SwanLab in its offline mode: the contents of its files, read by SwanLab's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.observe.trackers.run_ids import RunIds
from mcore_rl.observe.trackers.swanlab import SwanlabRun, login_problem
from tests.selection import needs_package
from tests.unit.observe.trackers.recorded import facts, response

pytestmark = needs_package("swanlab", "scripts/setup_trackers.sh")


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the logins of this machine's user."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_SAVE_DIR"):
        monkeypatch.delenv(name, raising=False)


def write(run_dir: Path, first_step: int, *, failed: bool, **more: float) -> list[object]:
    """Write two steps in one start of a run, the first one with `more` metrics. Returns all records of its files."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    before = set(run_dir.rglob("*.swanlab"))
    run = SwanlabRun(facts(run_dir, first_step=first_step))
    run.append(first_step, {"reward/mean": 0.25} | more, [response(), response(is_validation=True, text="valid")])
    run.append(first_step + 1, {"reward/mean": 0.5}, [])
    run.close(failed=failed)
    (path,) = set(run_dir.rglob("*.swanlab")) - before
    reader = DataStoreReader()
    reader.open(path)
    return [Record.FromString(data) for data in reader]


def of_kind(records: list[object], kind: str) -> list[object]:
    return [getattr(record, kind) for record in records if record.HasField(kind)]


@pytest.mark.slow
def test_swanlab_offline_records_metrics_config_and_texts(tmp_path: Path) -> None:
    records = write(tmp_path, 0, failed=True)
    scalars = [(each.key, each.step, each.value.number) for each in of_kind(records, "scalar")]
    assert scalars == [("reward/mean", 0, 0.25), ("reward/mean", 1, 0.5)]
    texts = {each.key: each.value.items[0] for each in of_kind(records, "media")}
    assert set(texts) == {"responses/training", "responses/validation"}
    assert texts["responses/training"].caption == "group 3, reward 0.5, accuracy 1, 7 tokens, stop"
    (path,) = tmp_path.rglob(texts["responses/training"].filename)
    assert path.read_text(encoding="utf-8") == f"1+1=?\n\n{response().response}"
    (finish,) = of_kind(records, "finish")
    assert "signal" in finish.error
    (config,) = tmp_path.rglob("config.yaml")
    assert "abc-dirty" in config.read_text()


@pytest.mark.slow
def test_swanlab_sections_are_the_charts_of_the_report(tmp_path: Path) -> None:
    more = {"reward/kl": 0.1, "reward/format": 1.0, "val/accuracy/gsm8k": 0.5, "own/metric": 2.0}
    columns = of_kind(write(tmp_path, 0, failed=False, **more), "column")
    sections = {each.column_key: each.section_name for each in columns}
    assert sections["reward/mean"] == "Reward"
    assert sections["reward/kl"] == "KL divergence"  # named there, though it matches reward/*
    assert sections["reward/format"] == "Parts of the reward"
    assert sections["val/accuracy/gsm8k"] == "Accuracy"
    assert sections.get("own/metric", "") in {"", "own"}


@pytest.mark.slow
def test_swanlab_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    starts = [of_kind(write(tmp_path, first, failed=False), "start")[0] for first in (0, 2)]
    run_id = RunIds(tmp_path / "trackers").get("swanlab")
    assert [start.id for start in starts] == [run_id, run_id]
    assert {(start.project, start.name) for start in starts} == {("project", "name")}


def test_swanlab_without_key_names_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "SWANLAB_API_KEY" in (login_problem() or "")
    monkeypatch.setenv("SWANLAB_API_KEY", "0" * 21)
    assert login_problem() is None


def test_swanlab_offline_mode_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    assert login_problem() is None
