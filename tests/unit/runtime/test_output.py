"""Output of Ray and native code in the driver goes to a file, Python's output to the terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
from pathlib import Path
from ray._private import worker
from mcore_rl.observe.progress import start_up_log
from mcore_rl.runtime.output import own_stderr, ray_output_to
from mcore_rl.runtime.stops import _print
before = sys.stderr
with ray_output_to(Path(sys.argv[1])):
    print("without own_stderr", file=sys.stderr)
try:
    with own_stderr():
        early = start_up_log()
        with ray_output_to(Path(sys.argv[1])):
            os.write(2, b"*** stack dump\\n")
            worker.print_to_stdstream({"lines": ["Raylet is terminated."], "pid": "raylet", "is_err": False}, False)
            print("from Python", file=sys.stderr)
            early("from an early reference")
            _print("from a signal handler")
            raise ValueError
except ValueError:
    assert sys.stderr is before
    os.write(2, b"after it\\n")
    print("error: one message", file=sys.stderr)
"""


def test_ray_output_goes_to_its_log_and_python_output_to_the_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "logs")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.rpartition("] ")[2] for line in ended.stderr.splitlines()]
    expected = ["without own_stderr", "from Python", "from an early reference", "from a signal handler"]
    assert lines == [*expected, "after it", "error: one message"]
    assert ended.stdout == ""
    assert (tmp_path / "logs" / "ray.log").read_text() == "*** stack dump\n(raylet) Raylet is terminated.\n"
