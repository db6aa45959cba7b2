"""Scripts that install libraries for tests beside the environment, with a stand-in for pip."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.readme import ROOT

PYTHON = """#!/bin/sh
# Called as: -m pip install ... --target FOLDER -r LOCK
while [ "$1" != --target ]; do shift; done
[ -e fail ] && exit 1
cp "$4" "$2/installed"
"""


@pytest.mark.parametrize("name", ["connectors", "trackers"])
def test_libraries_are_installed_again_for_another_lock(name: str, tmp_path: Path) -> None:
    for folder in ("scripts", "locks", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    script, lock = tmp_path / "scripts" / f"setup_{name}.sh", tmp_path / "locks" / f"{name}.txt"
    for each in (script.name, "install_library_folder.sh"):
        shutil.copy(ROOT / "scripts" / each, tmp_path / "scripts")
    (tmp_path / ".venv/bin/python").write_text(PYTHON)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    installed = tmp_path / ".peers" / name / "installed"

    def run() -> tuple[int, str]:
        done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    lock.write_text("a==1\n")
    assert "installed" in run()[1]
    assert run() == (0, f".peers/{name} exists\n")
    lock.write_text("a==2\n")
    (tmp_path / "fail").touch()
    assert run()[0] == 1
    assert installed.read_text() == "a==1\n", "a failed installation keeps the old one"
    (tmp_path / "fail").unlink()
    assert run()[0] == 0
    assert installed.read_text() == "a==2\n"
    assert [each.name for each in installed.parent.parent.iterdir()] == [name]
