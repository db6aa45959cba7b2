"""Checks of a node before a job starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mcore_rl.slurm import node_check


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    (tmp_path / "checked").mkdir()
    (tmp_path / "token").write_text("secret")
    return tmp_path


def check(attempt: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int = 0) -> int:
    monkeypatch.setattr(sys, "argv", ["node_check", "--attempt", str(attempt), "--gpus", str(num_gpus)])
    return node_check.main()


def names(attempt: Path) -> list[str]:
    return [path.name for path in (attempt / "checked").iterdir()]


def nvidia_smi(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    program = directory / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/bin")


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_node_check_of_working_node_creates_its_file(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    if num_gpus:
        nvidia_smi(attempt, monkeypatch, "echo GPU-1; echo GPU-2")
    assert check(attempt, monkeypatch, num_gpus) == 0
    assert names(attempt) == ["n7"]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("echo GPU-1; echo GPU-2", "nvidia-smi lists 2 GPUs, but cluster.gpus_per_node=4"),
        ("echo Unable to determine the device handle; exit 15", "nvidia-smi failed: Unable to determine"),
    ],
)
def test_node_check_without_gpus_fails(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, reason: str
) -> None:
    nvidia_smi(attempt, monkeypatch, program)
    assert check(attempt, monkeypatch, 4) == 1
    assert capsys.readouterr().out.startswith(f"n7: {reason}")
    assert names(attempt) == []


def test_node_check_without_packages_or_shared_files_fails(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (attempt / "token").unlink()
    assert check(attempt, monkeypatch) == 1
    assert "storage that all nodes share" in capsys.readouterr().out
    monkeypatch.setattr(node_check, "NEEDED", ("torch", "megatron.absent"))
    assert check(attempt, monkeypatch) == 1
    assert "megatron.absent is not installed" in capsys.readouterr().out
