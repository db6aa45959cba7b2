"""Output of other packages goes to the run's logs, our own to the terminal."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from mcore_rl.observe.third_party import third_party_log


def test_log_buffers_lines_until_directory_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with third_party_log() as log:
        warnings.warn("before there is a directory", stacklevel=1)
        logging.getLogger("somebody.else").warning("also %s", "before")
        log.begin(tmp_path / "logs")
        warnings.warn("after", RuntimeWarning, stacklevel=1)
        logging.getLogger("mcore_rl.trainer").warning("our own")
        written = (tmp_path / "logs" / "driver.log").read_text().splitlines()
    assert [line.partition(": ")[2] for line in written] == [
        "UserWarning: before there is a directory",
        "also before",
        "RuntimeWarning: after",
    ]
    assert capsys.readouterr().err == "our own\n"


def test_warnings_are_shown_again_after_the_block(tmp_path: Path) -> None:
    with third_party_log():
        pass
    with pytest.warns(UserWarning, match="seen"):
        warnings.warn("seen", stacklevel=1)


def test_output_of_process_and_children_is_in_its_log(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from mcore_rl.runtime.output import write_output_to\n"
        f"write_output_to(Path({str(tmp_path / 'logs')!r}), 'trainer rank 3')\n"
        "print('from Python', flush=True); os.system('echo from a child; echo its errors >&2'); os.write(2, b'raw\\n')"
    )
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("", "")
    lines, log = ["from Python", "from a child", "its errors", "raw"], tmp_path / "logs" / "trainer_rank_3.log"
    assert log.read_text().splitlines() == lines * 2  # a second start adds
    assert log.stat().st_mode & 0o777 == 0o600
