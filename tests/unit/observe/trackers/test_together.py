"""All installed trackers at once, offline, as a run uses them: in threads, over a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.config.observe import TRACKERS as NAMES
from mcore_rl.observe.trackers.check import installed_version
from mcore_rl.observe.trackers.registry import TRACKERS

RUN = """
import sys
from pathlib import Path
from mcore_rl.config.observe import ObserveConfig
from mcore_rl.observe.journal import RunJournal
from mcore_rl.observe.trackers.check import check_observers
from mcore_rl.types import Total

run_dir, last_step, *trackers = sys.argv[1:]
observe = ObserveConfig(trackers=trackers, trackers_offline=True)
check_observers(observe)
journal = RunJournal(Path(run_dir), 4, list, [], observe=observe)
journal.resume_after(int(last_step))
for step in range(int(last_step) + 1, int(last_step) + 3):
    journal.record({"reward/mean": Total(step / 10)})
    journal.finish_step(step)
journal.close(failed=False)
"""


@pytest.mark.slow
def test_trackers_together_lose_nothing_over_a_resume(tmp_path: Path) -> None:
    installed = [name for name in NAMES if installed_version(TRACKERS[name]) is not None]
    if len(installed) == 1:
        pytest.skip("no tracker besides tensorboard is installed")
    run_dir = tmp_path / "run"
    (run_dir / "rollouts").mkdir(parents=True)
    record = {"prompt": "1+1=?", "response": "2", "reward": 1.0, "accuracy": 1.0, "tokens": 1, "group": 0}
    for step in range(4):
        (run_dir / "rollouts" / f"step_{step}.jsonl").write_text(json.dumps(record) + "\n")
    ids = []
    # No login, and no settings of this machine's user.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "SWANLAB"))}
    environment |= {"PYTHONPATH": ":".join(filter(None, sys.path)), "HOME": str(tmp_path)}
    for last_step in ("-1", "1"):
        command = [sys.executable, "-c", RUN, str(run_dir), last_step, *installed]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        # Lines of the journal about lost entries begin so.
        assert "tracker " not in done.stderr
        assert "Traceback" not in done.stderr
        ids.append(json.loads((run_dir / "trackers" / "ids.json").read_text()))
    assert ids[0] == ids[1]
    assert set(ids[0]) == set(installed) - {"tensorboard"}
