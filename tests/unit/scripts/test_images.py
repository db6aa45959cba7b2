"""Images in docker/: pinned, without secrets, set up from a lock, and accepted by hadolint."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.readme import ROOT

IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{ROOT}/.venv/bin") or shutil.which("hadolint")


def instructions(path: Path) -> list[str]:
    """Return the instructions without comments; continued lines are joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def test_there_is_an_image_for_each_extra() -> None:
    assert [path.name for path in IMAGES] == ["cpu.Dockerfile", "gpu.Dockerfile"]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_base_is_pinned_by_exact_version_and_digest(path: Path) -> None:
    bases = [line.split()[1] for line in instructions(path) if line.startswith("FROM ")]
    assert len(bases) == 1
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w.-]+@sha256:[0-9a-f]{64}", bases[0])


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_packages_of_the_distribution_leave_no_lists(path: Path) -> None:
    installs = [line for line in instructions(path) if "apt-get install" in line]
    assert len(installs) == 1
    assert "--no-install-recommends" in installs[0]
    assert installs[0].endswith("&& rm -rf /var/lib/apt/lists/*")


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_settings_of_pip_are_a_mounted_secret(path: Path) -> None:
    lines = instructions(path)
    assert [line for line in lines if re.search("TOKEN|PASSWORD|SECRET|KEY=", line)] == []
    setups = [line for line in lines if "scripts/setup" in line]
    for setup in setups:
        assert setup.startswith("RUN --mount=type=secret,id=pip,target=/etc/pip.conf ")
        assert "EXTRA=gpu" in setup or "EXTRA=cpu LOCKED=1" in setup
    scripts = [setup.split()[-1] for setup in setups]
    assert scripts == ["scripts/setup.sh"] + ["scripts/setup_sglang.sh"] * (path.name == "gpu.Dockerfile")


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: make setup")
@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_hadolint_accepts(path: Path) -> None:
    done = subprocess.run([str(HADOLINT), "--no-color", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cpu_lock_satisfies_pyproject_and_has_no_package_of_cuda() -> None:
    lines = [Requirement(line) for line in (ROOT / "locks" / "cpu.txt").read_text().splitlines() if line[0] not in "# "]
    assert all(len(line.specifier) == 1 and str(line.specifier).startswith("==") for line in lines)
    on_linux = {"sys_platform": "linux", "platform_machine": "x86_64", "python_full_version": "3.12.12",
                "python_version": "3.12", "extra": "", "platform_system": "Linux", "os_name": "posix",
                "implementation_name": "cpython", "platform_python_implementation": "CPython"}  # fmt: skip
    here = [line for line in lines if line.marker is None or line.marker.evaluate(on_linux)]
    versions = {canonicalize_name(line.name): next(iter(line.specifier)).version for line in here}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for text in [*project["dependencies"], *extras["cpu"], *extras["dev"]]]
    wrong = [str(each) for each in wanted
             if not each.specifier.contains(versions.get(canonicalize_name(each.name), "0"), prereleases=True)
             or canonicalize_name(each.name) not in versions]  # fmt: skip
    assert wrong == [], "make it anew: scripts/lock.sh"
    assert [name for name in versions if name.startswith(("nvidia-", "cuda-", "triton"))] == []
    assert "uv" in versions  # scripts/setup.sh installs the version of the lock
