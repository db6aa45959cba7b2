"""locks/sglang_gpu.txt agrees with SGLang's requirements, with locks/gpu.txt, and with the image."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
from packaging.requirements import Requirement

from mcore_rl.config.rules.engine_support import SGLANG_VERSION, sglang_packages
from tests.locks import ENVIRONMENTS, locked, requirements, unsatisfied
from tests.readme import ROOT

NAME = "sglang_gpu.txt"
DOCUMENT = (ROOT / "docs" / "gpu.md").read_text()


@pytest.fixture(scope="module", params=ENVIRONMENTS, ids=lambda environment: environment["python_version"])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    environment: dict[str, str] = request.param
    return environment


@pytest.fixture(scope="module")
def versions(environment: dict[str, str]) -> dict[str, str]:
    return locked(NAME, environment)


def test_sglang_lock_satisfies_its_input(versions: dict[str, str]) -> None:
    assert unsatisfied(requirements("sglang_gpu.in"), versions) == {}, "make it anew: scripts/lock.sh"
    assert versions["sglang"] == SGLANG_VERSION
    assert {"torch-memory-saver", "sglang-kernel", "flashinfer-python"} <= set(versions)


def test_sglang_lock_satisfies_the_wheels_requirements(environment: dict[str, str], versions: dict[str, str]) -> None:
    packages = [str(path) for path in sglang_packages()]
    found = list(importlib.metadata.distributions(name="sglang", path=packages))
    if not found:
        pytest.skip("SGLang is not installed: make sglang")
    asked = [Requirement(text) for text in found[0].requires or []]
    asked = [each for each in asked if each.marker is None or each.marker.evaluate(environment)]
    assert len(asked) > 30
    assert unsatisfied(asked, versions) == {}


def test_sglang_lock_names_no_index_and_no_file() -> None:
    text = (ROOT / "locks" / NAME).read_text()
    assert re.findall(r"https?://|file:|--\S*index\S*|--find-links", text) == []


def test_sglang_lock_has_the_trainers_cuda(environment: dict[str, str], versions: dict[str, str]) -> None:
    cuda = locked("gpu.txt", environment)["nvidia-cuda-runtime"].split(".")[:2]
    for part in ("runtime", "nvcc", "crt", "nvrtc", "cccl"):
        assert versions[f"nvidia-cuda-{part}"].split(".")[:2] == cuda, part
    assert versions["nvidia-nvvm"].split(".")[:2] == cuda


def test_sglang_lock_has_the_trainers_nccl(environment: dict[str, str], versions: dict[str, str]) -> None:
    (override,) = requirements("gpu_overrides.txt")
    assert override.specifier.contains(versions["nvidia-nccl-cu13"])
    assert locked("gpu.txt", environment)["nvidia-nccl-cu13"] == versions["nvidia-nccl-cu13"]


def test_document_has_the_versions_of_the_sglang_lock(versions: dict[str, str]) -> None:
    cuda = ".".join(versions["nvidia-cuda-runtime"].split(".")[:2])
    assert f"| SGLang | {versions['sglang']}, with torch {versions['torch']}, CUDA {cuda} |" in DOCUMENT
