"""Orders GPU tests by stage, and skips those that this machine cannot run, naming the missing requirement. Markers of
the tests state the requirements.

MCORE_RL_GPU_TESTS_ON=cpu runs the tests that need only torch and megatron-core on the CPU, to debug them without a GPU.
Tests that measure a GPU's own memory (`cuda(only=True)`) or need TransformerEngine, vLLM or SGLang for CUDA stay
skipped. A test that passes on the CPU proves nothing about a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from mcore_rl.config.rules.engine_support import sglang_python, sglang_version
from mcore_rl.errors import ConfigError
from mcore_rl.resolved.installed import TRANSFORMER_ENGINE, version_of
from tests.gpu.outcomes import FIGURE
from tests.gpu.stages import place_of

ON_CPU = os.environ.get("MCORE_RL_GPU_TESTS_ON") == "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    places = [place for place, item in enumerate(items) if here in item.path.parents]
    ordered = sorted((items[place] for place in places), key=lambda item: place_of(item.path.name))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item
        if missing := what_is_missing(item):
            item.add_marker(pytest.mark.skip(reason="; ".join(missing)))


def what_is_missing(item: pytest.Item) -> list[str]:
    """Return the requirements of a test's markers that this machine lacks."""
    missing = [*_missing_devices(item)]
    if item.get_closest_marker("te") and (ON_CPU or version_of(TRANSFORMER_ENGINE) is None):
        missing.append("needs transformer-engine")
    if item.get_closest_marker("vllm") and (ON_CPU or version_of(["vllm"]) is None):
        missing.append("needs vLLM for CUDA")
    if item.get_closest_marker("sglang") and (ON_CPU or not has_sglang()):
        missing.append("needs SGLang for CUDA")
    return missing


@cache
def has_sglang() -> bool:
    """Return whether SGLang's environment (`make sglang EXTRA=gpu`) has what a rank on a GPU needs."""
    from mcore_rl.engines.sglang.environment import find_memory_saver

    try:
        find_memory_saver(sglang_python())
    except ConfigError:
        return False
    return sglang_version() is not None


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
    """Count the CUDA devices that are visible to this process."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(scope="session")
def device() -> str:
    """Return the device of models and tensors: cuda, or cpu to debug the tests."""
    return "cpu" if ON_CPU else "cuda"


@pytest.fixture(scope="module", autouse=True)
def as_users_run() -> Iterator[None]:
    """Enable the compiler, which tests/conftest.py disables for CPUs: on GPUs vLLM and Megatron need it."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_CPU:
            patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
        yield


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return a function that adds a measured value to the summary of the run. No test asserts a time."""
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
