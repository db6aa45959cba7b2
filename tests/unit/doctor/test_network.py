"""The doctor compares the NCCL of both environments, and checks the access to InfiniBand."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from mcore_rl.doctor import network
from mcore_rl.doctor.network import check_infiniband, check_locked_memory, check_nccl, check_network
from mcore_rl.resolved.nccl import NcclPackages


def test_check_nccl_compares_both_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    package = "nvidia-nccl-cu13"
    monkeypatch.setattr(network, "nccl_packages", lambda: NcclPackages((package, "2.29.7"), (package, "2.30.7")))
    (check,) = check_nccl()
    assert (check.ok, check.found) == (False, "2.30.7, trainer ranks have 2.29.7")
    assert f"pip install --no-deps {package}==2.30.7" in check.remedy
    monkeypatch.setattr(network, "nccl_packages", lambda: None)
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


def test_infiniband_devices_need_device_files_that_open(tmp_path: Path) -> None:
    assert check_infiniband(tmp_path) == []
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / "sys/class/infiniband" / name).mkdir(parents=True)
    (check,) = check_infiniband(tmp_path)
    assert (check.ok, check.found) == (False, "mlx5_0, mlx5_1, but no /dev/infiniband/uverbs*")
    assert "--device=/dev/infiniband" in check.remedy
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/rdma_cm").touch()  # exists without access to a device
    assert not check_infiniband(tmp_path)[0].ok
    # A directory stands for a file that this process may not open: its errors are those of a device, even for root.
    (tmp_path / "dev/infiniband/uverbs0").mkdir()
    (check,) = check_infiniband(tmp_path)
    assert (check.ok, check.found) == (False, "mlx5_0, mlx5_1, but /dev/infiniband/uverbs0: Is a directory")
    assert "read and write /dev/infiniband" in check.remedy
    (tmp_path / "dev/infiniband/uverbs1").touch()
    assert check_infiniband(tmp_path)[0].ok


@pytest.mark.parametrize("gpus", [False, True])
def test_access_to_infiniband_is_checked_with_gpus_only(monkeypatch: pytest.MonkeyPatch, gpus: bool) -> None:
    monkeypatch.setattr(network, "_has_gpus", lambda: gpus)
    assert ("locked memory" in [check.name for check in check_network()]) == gpus
