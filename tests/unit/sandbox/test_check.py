"""Error messages for sandboxes that do not work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import ConfigError, SandboxError
from mcore_rl.sandbox import check
from mcore_rl.sandbox.check import check_sandbox, open_sandbox
from mcore_rl.sandbox.confinement import commands
from mcore_rl.sandbox.fusion import FusionSandbox
from mcore_rl.sandbox.interface import Program
from mcore_rl.sandbox.local import LocalSandbox
from tests.unit.sandbox.conftest import limited

REFUSAL = "bwrap: Creating new namespace failed: nesting depth or /proc/sys/user/max_*_namespaces exceeded (ENOSPC)"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory that replaces PATH, in addition to /usr/bin; every user may read it."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for place in (directory, *directory.parents):
        if place.owner() != "root" or place.stat().st_mode & 0o5 != 0o5:
            place.chmod(place.stat().st_mode | 0o5)
        if place.name.startswith("pytest-of"):
            break
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    return directory


def fake_bwrap(programs: Path, words: str) -> str:
    """Install a bubblewrap that fails with this message; returns its path."""
    fake = programs / "bwrap"
    fake.write_text(f'#!/bin/sh\necho "{words}" >&2\nexit 1\n')
    fake.chmod(0o755)
    return str(fake)


def test_check_sandbox_reports_bubblewraps_message(programs: Path) -> None:
    fake_bwrap(programs, REFUSAL)
    with pytest.raises(ConfigError) as refused:
        check_sandbox(limited())
    message = str(refused.value)
    assert message.startswith(f"sandbox.kind=bubblewrap: the sandbox did not start: {REFUSAL}; ")
    assert "set sandbox.kind=landlock, which does not" in message
    assert "or sandbox.url to a SandboxFusion server" in message


def test_missing_bubblewrap_names_the_remedy(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(ConfigError, match=r"bubblewrap is not installed; `make sandbox` installs it"):
        check_sandbox(limited())
    with pytest.raises(SandboxError, match="bubblewrap is not installed"):
        LocalSandbox(limited()).interpreter()


def test_may_mount_proc_detects_refusal(programs: Path) -> None:
    fake = fake_bwrap(programs, "bwrap: Can't mount proc on /newroot/proc: Operation not permitted")
    assert not commands.may_mount_proc(fake)


def test_check_sandbox_of_working_sandbox_passes(sandbox: LocalSandbox) -> None:
    check_sandbox(limited())


def test_check_sandbox_names_missing_python(sandbox: LocalSandbox) -> None:
    with pytest.raises(
        ConfigError, match=r"sandbox\.python=/opt/none/python does not run inside: .*sandbox\.read_only"
    ):
        check_sandbox(limited(python="/opt/none/python"))


def test_python_in_read_only_directory_runs(sandbox: LocalSandbox, programs: Path) -> None:
    (programs / "python").symlink_to("/usr/bin/python3")
    (programs / "note").write_text("read only")
    config = limited(python=str(programs / "python"), read_only=[str(programs)])
    check_sandbox(config)
    path = str(programs / "note")
    code = f"print(open({path!r}).read())\ntry: open({path!r}, 'w')\nexcept OSError as e: print(e.strerror)"
    outcome = LocalSandbox(config).run(Program(code))
    assert outcome.stdout == "read only\nRead-only file system\n", outcome


def test_unreachable_server_is_named() -> None:
    config = SandboxConfig(url="http://127.0.0.1:9/")
    assert isinstance(open_sandbox(config), FusionSandbox)
    with pytest.raises(ConfigError, match=r"sandbox\.url=http://127\.0\.0\.1:9/ cannot be used: .*refused"):
        check_sandbox(config)


@pytest.mark.parametrize("seconds", [0.5, 90.0])
def test_check_has_a_minimum_time_limit(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, an empty process can take a second."""
    limits: list[float] = []

    class Sandbox:
        def __init__(self, config: SandboxConfig) -> None:
            self.seconds = config.seconds

        def execute(self, command: Sequence[str]) -> SimpleNamespace:
            limits.append(self.seconds)
            return SimpleNamespace(ok=True, return_code=0, why="exit", stderr="")

    monkeypatch.setattr(check, "LocalSandbox", Sandbox)
    check_sandbox(SandboxConfig(seconds=seconds))
    assert limits == [max(check.SECONDS, seconds)] * 2
