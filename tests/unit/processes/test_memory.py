"""Memory of a process tree."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mcore_rl.processes.tree import resident_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_resident_bytes_includes_children() -> None:
    code = "x = bytearray(b'1') * 2**26; print(flush=True); input()"
    before = resident_bytes(os.getpid())
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        assert resident_bytes(child.pid) > 2**26
        assert resident_bytes(os.getpid()) > before + 2**26
        child.stdin.close()
    assert resident_bytes(child.pid) == 0
