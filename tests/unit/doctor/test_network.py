"""The doctor compares the NCCL of both environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config.rules.engine_support import SGLANG_PYTHON
from mcore_rl.doctor import network
from mcore_rl.doctor.network import check_nccl, compare_nccl


def make_environment(root: Path, **versions: str) -> Path:
    """Make a virtual environment with metadata of packages; returns its folder of packages."""
    packages = root / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    for name, version in versions.items():
        metadata = packages / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    return packages


@pytest.mark.parametrize(
    ("ours", "theirs", "ok", "newest"),
    [
        ("2.29.7", "2.29.7", True, "2.29.7"),
        ("2.29.7", "2.30.7", False, "2.30.7"),
        ("2.29.7", "2.29.7.1", True, "2.29.7.1"),  # another build of the wheel
        ("2.30.7", "2.9.1", False, "2.30.7"),
    ],
)
def test_compare_nccl_requires_one_version(ours: str, theirs: str, ok: bool, newest: str) -> None:
    check = compare_nccl(("nvidia-nccl-cu13", ours), ("nvidia-nccl-cu13", theirs))
    assert check.ok == ok
    assert f"pip install --no-deps nvidia-nccl-cu13=={newest}" in check.remedy
    assert ours in check.found
    assert theirs in check.found


def test_check_nccl_reads_both_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_environment(tmp_path / "ours", nvidia_nccl_cu13="2.29.7")
    make_environment(tmp_path / "theirs", nvidia_nccl_cu13="2.30.7")
    monkeypatch.setattr(network.sysconfig, "get_path", lambda name: str(ours))
    monkeypatch.setenv(SGLANG_PYTHON, str(tmp_path / "theirs" / "bin" / "python"))
    (check,) = check_nccl()
    assert not check.ok
    assert check.found == "2.30.7, trainer ranks have 2.29.7"


@pytest.mark.parametrize("sglang", [{}, None])
def test_check_nccl_without_a_second_nccl_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sglang: dict[str, str] | None
) -> None:
    ours = make_environment(tmp_path / "ours", nvidia_nccl_cu13="2.29.7")
    if sglang is not None:
        make_environment(tmp_path / "theirs", **sglang)
    monkeypatch.setattr(network.sysconfig, "get_path", lambda name: str(ours))
    monkeypatch.setenv(SGLANG_PYTHON, str(tmp_path / "theirs" / "bin" / "python"))
    assert check_nccl() == []
