"""Ranks and engines keep compiled kernels in a directory of their node, unless the user has named another."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.schema import Config
from mcore_rl.processes import compile_caches
from mcore_rl.processes.compile_caches import DEEP_GEMM_OF_SGLANG, FOLDERS, use_node_directories
from mcore_rl.runtime.roles.base import RankProcess, SetUpContext
from mcore_rl.runtime.spans import SpanRecorder
from tests.readme import ROOT


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return this user's directory of an empty node, on which no variable is set."""
    monkeypatch.setattr(compile_caches, "PARENT", tmp_path)
    for name in (*FOLDERS, DEEP_GEMM_OF_SGLANG):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    return tmp_path / f"mcore-rl-{os.getuid()}"


class Rank(RankProcess):
    """Rank that records its environment when its model would be built."""

    def __init__(self) -> None:
        self.spans = SpanRecorder("rank")
        self.environment: dict[str, str] = {}

    def _build(self, context: SetUpContext, rank: int, world_size: int, address: str) -> None:
        self.environment = dict(os.environ)


def started_rank(device: str) -> dict[str, str]:
    config = Config()
    config.cluster.device = device
    rank: Any = Rank()
    rank.setup(SetUpContext(config, {}), 0, 1, "tcp://127.0.0.1:1")
    return {name: value for name, value in rank.environment.items() if name in FOLDERS}


def test_rank_on_gpus_compiles_into_the_nodes_directory(node: Path) -> None:
    environment = started_rank("cuda")
    assert {
        *("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"),
        *("CUDA_CACHE_PATH", "DG_JIT_CACHE_DIR"),
    } <= set(environment)
    assert {Path(value).relative_to(node).parts[0] for value in environment.values()} == {
        folder.split("/")[0] for folder in FOLDERS.values()
    }
    assert stat.S_IMODE(node.stat().st_mode) == 0o700


def test_rank_on_gpus_keeps_the_users_directory(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    environment = started_rank("cuda")
    assert environment["TRITON_CACHE_DIR"] == "/mine"
    assert environment["VLLM_CACHE_ROOT"] == str(node / "vllm")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),  # SGLang's default, in SGLANG_CACHE_DIR
        ({"DG_JIT_CACHE_DIR": "/mine"}, "/mine"),
        ({"DG_JIT_CACHE_DIR": "/mine", "SGLANG_DG_CACHE_DIR": "/other"}, "/other"),
    ],
)
def test_deep_gemm_directory_of_the_user_is_also_sglangs(
    node: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    use_node_directories()
    use_node_directories()  # again, in a child that inherits the variables
    assert os.environ.get(DEEP_GEMM_OF_SGLANG) == expected


def test_document_lists_all_variables() -> None:
    document = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
    assert [name for name in FOLDERS if f"`{name}`" not in document] == []


def test_rank_on_cpu_sets_no_directory(node: Path) -> None:
    assert started_rank("cpu") == {}
    assert not node.exists()


@pytest.mark.parametrize("kind", ["link", "writable", "file"])
def test_directory_that_others_can_change_is_not_used(node: Path, tmp_path: Path, kind: str) -> None:
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        node.symlink_to(tmp_path / "elsewhere")
    elif kind == "writable":
        node.mkdir()
        node.chmod(0o777)
    else:
        node.touch()
    use_node_directories()
    assert [name for name in FOLDERS if name in os.environ] == []
