"""The doctor compares the NCCL of both environments, and checks the access to InfiniBand."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from mcore_rl.config.rules.engine_support import SGLANG_PYTHON
from mcore_rl.doctor import network
from mcore_rl.doctor.network import check_infiniband, check_locked_memory, check_nccl, check_network, compare_nccl


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


@pytest.mark.parametrize(
    ("soft", "ok", "found"),
    [
        (8 << 20, False, "8 MiB (hard limit unlimited)"),  # the default of many distributions
        (64 << 30, True, "65536 MiB (hard limit unlimited)"),
        (resource.RLIM_INFINITY, True, "unlimited (hard limit unlimited)"),
    ],
)
def test_locked_memory_below_64_gib_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, soft: int, ok: bool, found: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, resource.RLIM_INFINITY))
    check = check_locked_memory()
    assert (check.ok, check.found) == (ok, found)
    assert "--ulimit memlock=-1" in check.remedy


def test_infiniband_devices_need_device_files(tmp_path: Path) -> None:
    assert check_infiniband(tmp_path) == []
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / "sys/class/infiniband" / name).mkdir(parents=True)
    (check,) = check_infiniband(tmp_path)
    assert (check.ok, check.found) == (False, "mlx5_0, mlx5_1, but no /dev/infiniband/uverbs*")
    assert "--device=/dev/infiniband" in check.remedy
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/rdma_cm").touch()  # exists without access to a device
    assert not check_infiniband(tmp_path)[0].ok
    (tmp_path / "dev/infiniband/uverbs0").touch()
    assert check_infiniband(tmp_path)[0].ok


@pytest.mark.parametrize("gpus", [False, True])
def test_access_to_infiniband_is_checked_with_gpus_only(monkeypatch: pytest.MonkeyPatch, gpus: bool) -> None:
    monkeypatch.setattr(network, "_has_gpus", lambda: gpus)
    assert ("locked memory" in [check.name for check in check_network()]) == gpus
