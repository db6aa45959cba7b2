"""End of Ray's daemons."""

from __future__ import annotations

import subprocess
from pathlib import Path
from unittest.mock import create_autospec

import psutil
from ray._private.node import Node
from ray._private.services import ProcessInfo

from mcore_rl.runtime.daemons import daemons_killed_at_once

RAYLET = """#!/bin/sh
trap "touch {term}; exit" TERM
mkfifo {pipe}
(sh -c "cat {pipe}; touch {removed}" & echo $!; exec sleep 600 > {pipe}) &
wait
"""
"""Stand-in for the raylet that records TERM. Its child runs on after its death, like Ray's agents, and has a child that
writes a file after its own parent's death, like the launcher of a sandbox."""


def test_daemons_killed_at_once_with_children_only_and_without_term(tmp_path: Path) -> None:
    program, term, removed = (tmp_path / name for name in ("raylet", "term", "removed"))
    program.write_text(RAYLET.format(term=term, removed=removed, pipe=tmp_path / "pipe"))
    program.chmod(0o700)
    with subprocess.Popen([str(program)], stdout=subprocess.PIPE, text=True) as raylet:
        assert raylet.stdout is not None
        launcher = psutil.Process(int(raylet.stdout.readline()))
        agent = psutil.Process(launcher.ppid())
        node = create_autospec(Node, instance=True)
        node.all_processes = {"raylet": [ProcessInfo(raylet, *[None] * (len(ProcessInfo._fields) - 1))]}
        node._kill_process_type = lambda name, **options: Node._kill_process_impl(
            node, name, options["allow_graceful"], options["check_alive"], options["wait"]
        )
        with daemons_killed_at_once():
            Node.kill_all_processes(node, check_alive=False, allow_graceful=True)
    assert psutil.wait_procs([agent, launcher], timeout=30)[1] == []
    assert removed.exists()
    assert not term.exists()
