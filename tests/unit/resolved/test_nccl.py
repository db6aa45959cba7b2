"""NCCL of both environments is found by the metadata of its packages."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from mcore_rl.config.rules.engine_support import SGLANG_PYTHON
from mcore_rl.resolved.nccl import NcclPackages, nccl_packages
from tests.environments import make_environment


@pytest.mark.parametrize(
    ("trainer", "sglang", "connect", "newest"),
    [
        ("2.29.7", "2.29.7", True, "2.29.7"),
        ("2.29.7", "2.30.7", False, "2.30.7"),
        ("2.29.7", "2.29.7.1", True, "2.29.7.1"),  # another build of the wheel
        ("2.30.7", "2.9.1", False, "2.30.7"),
    ],
)
def test_nccl_packages_connect_with_one_version(trainer: str, sglang: str, connect: bool, newest: str) -> None:
    packages = NcclPackages(("nvidia-nccl-cu13", trainer), ("nvidia-nccl-cu13", sglang))
    assert packages.connect == connect
    assert f"pip install --no-deps nvidia-nccl-cu13=={newest}" in packages.remedy


@pytest.mark.parametrize("sglang", [{"nvidia-nccl-cu13": "2.30.7"}, {}, None])
def test_nccl_packages_are_read_from_both_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sglang: dict[str, str] | None
) -> None:
    make_environment(tmp_path / "ours", {"nvidia-nccl-cu13": "2.29.7"})
    if sglang is not None:
        make_environment(tmp_path / "theirs", sglang)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "ours/lib/python3.11/site-packages"))
    monkeypatch.setenv(SGLANG_PYTHON, str(tmp_path / "theirs" / "bin" / "python"))
    found = NcclPackages(("nvidia-nccl-cu13", "2.29.7"), ("nvidia-nccl-cu13", "2.30.7"))
    assert nccl_packages() == (found if sglang else None)
