"""Fixtures of the tests of weight transports."""

from __future__ import annotations

import pytest
import torch

from mcore_rl.weights.transports import nccl, nccl_group
from mcore_rl.weights.transports.segments import SEGMENTS, SharedSegment
from tests.unit.weights.fake_gpus import compiled
from tests.unit.weights.nccl_model import Gpus


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of the fake CUDA runtime; skip the test without a C compiler."""
    try:
        return compiled(tmp_path_factory.mktemp("cudart"))
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Gpus]:
    """Replace GPU memory by host memory, and NCCL by its model. Append the streams before each sync connects."""
    made: list[Gpus] = []
    monkeypatch.setattr(nccl_group, "process_group", lambda store, rank, *_: made[-1].group(rank))
    monkeypatch.setattr(nccl, "this_gpu", lambda: torch.device("cpu"))
    monkeypatch.setitem(SEGMENTS, True, SharedSegment)
    return made
