"""Set-up scripts with EXTRA=gpu and the build of TransformerEngine, with an interpreter that only records its calls."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.readme import ROOT

INTERPRETER = """#!/usr/bin/env bash
printf '%s\\n' "$(basename "$0") $*" >>"$CALLS"
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/uv" ;;
  *"pip config get"*) exit 1 ;;
  "pip install "*--override*) exit "$UV_EXIT_CODE" ;;
  *torch.version.cuda*) exit "$TORCH_WITHOUT_CUDA" ;;
  *--no-build-isolation*) env >"$CALLS.environment"; echo "$BUILD_OUTPUT"; exit "$BUILD_EXIT_CODE" ;;
esac
"""
FAILED_BUILD = """Collecting transformer_engine_torch==2.11.0
  UserWarning: Unknown distribution option: 'tests_require'
  FAILED: csrc/common.o
  torch/include/ATen/cuda/CUDAContextLight.h:10:10: fatal error: cusparse.h: No such file or directory
     10 | #include <cusparse.h>
  ninja: build stopped: subcommand failed.
  socket.gaierror: [Errno -2] Name or service not known
  urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>
  error: subprocess-exited-with-error"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a machine with a CUDA toolkit and this interpreter."""
    interpreter = tmp_path / "python"
    interpreter.write_text(INTERPRETER)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    for program in (interpreter, nvcc):
        program.chmod(0o755)
    return {
        "PATH": f"{nvcc.parent}:/usr/bin:/bin",
        "PYTHON": str(interpreter),
        "EXTRA": "gpu",
        "CALLS": str(tmp_path / "calls"),
        "TORCH_WITHOUT_CUDA": "0",
        "UV_EXIT_CODE": "0",
        "BUILD_OUTPUT": "",
        "BUILD_EXIT_CODE": "0",
    }


def set_up(tmp_path: Path, environment: dict[str, str], script: str = "setup.sh") -> subprocess.CompletedProcess[str]:
    checkout = tmp_path / "checkout"
    for name in ("scripts", "locks", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        checkout.mkdir(exist_ok=True)
        copy(ROOT / name, checkout / name)
    command = [f"scripts/{script}"]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def calls(environment: dict[str, str]) -> list[str]:
    return Path(environment["CALLS"]).read_text().splitlines()


def test_set_up_for_gpus_leaves_torch_to_uv_and_the_lock(tmp_path: Path, environment: dict[str, str]) -> None:
    done = set_up(tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert [call for call in calls(environment) if "pip install" in call and " torch" in call] == []
    (uv,) = [call for call in calls(environment) if call.startswith("uv ")]
    assert "--override locks/gpu_overrides.txt -r locks/gpu.txt" in uv
    assert "18 minutes" in done.stdout


def test_set_up_for_gpus_never_lets_pip_replace_nccl(tmp_path: Path, environment: dict[str, str]) -> None:
    done = set_up(tmp_path, environment | {"UV_EXIT_CODE": "1"})
    assert done.returncode == 0, done.stderr
    pip = [call for call in calls(environment) if call.startswith("python -m pip install") and " uv==" not in call]
    assert ["-r locks/gpu.txt" in call for call in pip] == [True, False]  # instead of uv, and the build
    assert [call for call in pip if "--no-deps" not in call] == []


def test_set_up_for_gpus_rejects_torch_without_cuda(tmp_path: Path, environment: dict[str, str]) -> None:
    done = set_up(tmp_path, environment | {"TORCH_WITHOUT_CUDA": "1"})
    assert done.returncode == 1
    assert "without CUDA" in done.stderr
    assert "find-links" in done.stderr
    assert [call for call in calls(environment) if "--no-build-isolation" in call] == []
    assert not (tmp_path / "checkout" / ".venv" / ".mcore-rl-ready").exists()


def test_set_up_of_sglang_for_gpus_installs_the_lock_only(tmp_path: Path, environment: dict[str, str]) -> None:
    done = set_up(tmp_path, environment, "setup_sglang.sh")
    assert done.returncode == 0, done.stderr
    assert [call for call in calls(environment) if "pip install" in call and "torch" in call] == []
    assert [call for call in calls(environment) if "pip install" in call and " uv==" in call]
    (uv,) = [call for call in calls(environment) if call.startswith("uv ")]
    assert uv.endswith("--compile-bytecode --requirement locks/sglang_gpu.txt")


def test_set_up_of_sglang_for_gpus_rejects_torch_without_cuda(tmp_path: Path, environment: dict[str, str]) -> None:
    done = set_up(tmp_path, environment | {"TORCH_WITHOUT_CUDA": "1"}, "setup_sglang.sh")
    assert done.returncode == 1
    assert "without CUDA" in done.stderr
    assert not (tmp_path / "checkout" / ".venv-sglang" / ".mcore-rl-ready").exists()


def test_set_up_of_sglang_for_cpus_uses_no_lock(tmp_path: Path, environment: dict[str, str]) -> None:
    done = set_up(tmp_path, environment | {"EXTRA": "cpu"}, "setup_sglang.sh")
    assert done.returncode == 0, done.stderr
    uv = [call for call in calls(environment) if call.startswith("uv ")]
    assert len(uv) == 2
    assert "--no-deps sglang==0.5.23" in uv[1]
    assert [call for call in uv if "sglang_gpu" in call] == []


def build(tmp_path: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "nvidia").mkdir(parents=True)
    shutil.copy(environment["PYTHON"], programs / "python")
    command = [str(ROOT / "scripts" / "build_transformer_engine.sh"), "venv"]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


def test_build_uses_headers_of_the_lock_and_nvcc(tmp_path: Path, environment: dict[str, str]) -> None:
    done = build(tmp_path, environment | {"CPATH": "/mine"})
    assert done.returncode == 0, done.stderr
    lines = Path(f"{environment['CALLS']}.environment").read_text().splitlines()
    passed = dict(line.split("=", 1) for line in lines if "=" in line)
    nvidia = tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "nvidia"
    headers = [str(nvidia / package / "include") for package in ("cu13", "cudnn", "nccl")]
    assert passed["CPATH"].split(":") == [*headers, "/mine"]
    assert passed["LIBRARY_PATH"] == str(nvidia / "cu13" / "lib")
    assert passed["CUDA_HOME"] == str(tmp_path / "cuda")


def test_build_without_nvcc_names_the_variable(tmp_path: Path, environment: dict[str, str]) -> None:
    done = build(tmp_path, environment | {"CUDA_HOME": str(tmp_path / "absent")})
    assert done.returncode == 1
    assert f"{tmp_path}/absent/bin/nvcc is missing" in done.stderr
    assert "set CUDA_HOME" in " ".join(done.stderr.split())
    assert not Path(environment["CALLS"]).exists()


def test_failed_build_prints_the_compilers_first_error(tmp_path: Path, environment: dict[str, str]) -> None:
    done = build(tmp_path, environment | {"BUILD_OUTPUT": FAILED_BUILD, "BUILD_EXIT_CODE": "1"})
    assert done.returncode == 1
    assert "cusparse.h: No such file or directory" in done.stderr
    assert "urlopen" not in done.stderr
    assert "venv/transformer_engine.log" in done.stderr
