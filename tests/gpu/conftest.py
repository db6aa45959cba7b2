"""What each test here needs, said by its markers; one that cannot run is skipped with what is missing.

MCORE_RL_GPU_TESTS_ON=cpu runs on the CPU what needs torch and megatron-core alone, to debug the tests where there is no
GPU. What measures a GPU's own memory (`cuda(only=True)`), or needs TransformerEngine or vLLM for CUDA, stays skipped.
Nothing that passes that way says anything about a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from mcore_rl.resolved.installed import TRANSFORMER_ENGINE, version_of

ON_CPU = os.environ.get("MCORE_RL_GPU_TESTS_ON") == "cpu"
FIGURE = "figure"
"""The property of a test that the summary prints."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and (missing := what_is_missing(item)):
            item.add_marker(pytest.mark.skip(reason="; ".join(missing)))


def what_is_missing(item: pytest.Item) -> list[str]:
    """Of what the markers of a test ask for, on this machine."""
    missing = [*_missing_devices(item)]
    if item.get_closest_marker("te") and (ON_CPU or version_of(TRANSFORMER_ENGINE) is None):
        missing.append("needs transformer-engine")
    if item.get_closest_marker("vllm") and (ON_CPU or version_of(["vllm"]) is None):
        missing.append("needs vLLM for CUDA")
    return missing


def _missing_devices(item: pytest.Item) -> Iterator[str]:
    cuda, gpus = item.get_closest_marker("cuda"), item.get_closest_marker("gpus")
    assert cuda or gpus, f"{item.nodeid}: mark it with what it needs (cuda, gpus)"
    if ON_CPU:
        if cuda and cuda.kwargs.get("only"):
            yield "needs a CUDA device: nothing on a CPU stands in for it"
        return
    if gpus and num_devices() < gpus.args[0]:
        yield f"needs {gpus.args[0]} GPUs, this machine has {num_devices()}"
    elif cuda and not num_devices():
        yield "needs a CUDA device"


@cache
def num_devices() -> int:
    """CUDA devices that this process sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(scope="session")
def device() -> str:
    """Where models and tensors of a test are: cuda, or cpu to debug it."""
    return "cpu" if ON_CPU else "cuda"


@pytest.fixture(scope="module", autouse=True)
def as_users_run() -> Iterator[None]:
    """tests/conftest.py spares CPUs the compiler; on GPUs vLLM and megatron need it."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_CPU:
            patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
        yield


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Says a figure in the summary of the run: no test asserts a time."""
    return lambda text: record_property(FIGURE, text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    figures = [
        f"{passed.nodeid}: {text}"
        for passed in terminalreporter.getreports("passed")
        for name, text in passed.user_properties
        if name == FIGURE
    ]
    if figures:
        terminalreporter.section("figures" + (" (on the CPU)" if ON_CPU else ""))
        for line in figures:
            terminalreporter.line(line)
