"""Trackio with files on this machine, read by Trackio's own storage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.observe.trackers.run_ids import RunIds
from mcore_rl.observe.trackers.trackio import login_problem
from tests.selection import needs_package
from tests.unit.observe.trackers.recorded import HOSTILE

pytestmark = needs_package("trackio", "scripts/setup_trackers.sh")

WRITE = """
import sys
from pathlib import Path
from mcore_rl.observe.trackers.trackio import TrackioRun
from tests.unit.observe.trackers.recorded import facts, response

run_dir, first_step = Path(sys.argv[1]), int(sys.argv[2])
run = TrackioRun(facts(run_dir, first_step=first_step))
run.append(first_step, {"reward/mean": 0.25}, [response(), response(is_validation=True)])
run.append(first_step + 1, {"reward/mean": 0.5}, [])
run.close(failed=False)
"""
READ = """
import json
from trackio.sqlite_storage import SQLiteStorage as storage
runs = storage.get_runs("project")
print(json.dumps([runs, storage.get_logs("project", runs[0]), storage.get_run_config("project", runs[0])]))
"""


def python(code: str, run_dir: Path, *arguments: str) -> str:
    """Run code in a process of its own, because Trackio reads its directory at import."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path)), "HOME": str(run_dir)}
    environment |= {"TRACKIO_DIR": str(run_dir / "trackers" / "trackio"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, str(run_dir), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_trackio_records_metrics_and_tables_and_resumes(tmp_path: Path) -> None:
    python(WRITE, tmp_path, "0")
    python(WRITE, tmp_path, "2")
    runs, logs, config = json.loads(python(READ, tmp_path).splitlines()[-1])
    assert runs == [RunIds(tmp_path / "trackers").get("trackio")]
    assert runs[0].startswith("name-")
    assert [(row["step"], row["reward/mean"]) for row in logs] == [(0, 0.25), (1, 0.5), (2, 0.25), (3, 0.5)]
    (row,) = logs[0]["responses/training"]["_value"]
    assert (row["set"], row["reward"], row["response"]) == ("training", 0.5, HOSTILE)
    assert config["actor.optimizer.lr"] == 1e-6
    assert config["environment.revision"] == "abc-dirty"


def test_trackio_servers_need_their_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert login_problem() is None  # files on this machine
    monkeypatch.setenv("TRACKIO_SERVER_URL", "https://host:7860")
    assert login_problem() == "set TRACKIO_WRITE_TOKEN"
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "secret")
    assert login_problem() is None
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "HF_TOKEN" in (login_problem() or "")
