"""Processes of engines that the tests of a file start one after the other, and the engines of the contract suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.contract.engines import DIVIDED_BY_TWO, PASS_TOKENS, RANKS, RemoteEngine, start_engine
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def process_of() -> Iterator[Callable[[str], RemoteEngine]]:
    """Return a function from a kind of engine to its process, which starts on the first call."""
    processes: dict[str, RemoteEngine] = {}

    def process(kind: str) -> RemoteEngine:
        if kind not in processes:
            processes[kind] = RemoteEngine(kind)
        return processes[kind]

    yield process
    for started in processes.values():
        started.shutdown()


@pytest.fixture(scope="module")
def process(request: pytest.FixtureRequest, process_of: Callable[[str], RemoteEngine]) -> RemoteEngine:
    """Process for engines of the kind given as the parameter."""
    return process_of(request.param)


@pytest.fixture(scope="module")
def model() -> Any:
    """Model of `engine`."""
    return tiny_model("qwen3_moe", seed=3, **DIVIDED_BY_TWO)


@pytest.fixture(scope="module", params=RANKS)
def engine(
    request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RemoteEngine]:
    """Engine of the contract suite, of every kind and number of ranks, with and without drafts."""
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    kind, layout = request.param
    engine = start_engine(kind, directory, capture_routing=True, max_batched_tokens=PASS_TOKENS, **layout)
    yield engine
    engine.shutdown()
