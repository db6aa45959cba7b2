"""Threads and environment of the processes of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.config.schema import Config
from mcore_rl.engines.sglang.environment import _cores
from mcore_rl.runtime.cluster import process_environment
from mcore_rl.runtime.cores import shares_cores

SIZES: dict[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
CORES = len(os.sched_getaffinity(0))
TELL = """
import os
{first}
from mcore_rl.runtime.cores import share_cores
share_cores({peers})
import torch
print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
"""


@pytest.mark.parametrize(
    ("changes", "given", "device", "shares"),
    [
        ({}, None, "cpu", True),
        ({}, None, "cuda", False),
        ({}, "1", "cpu", False),
        ({"num_hidden_layers": 1, "hidden_size": 512}, None, "cpu", False),
    ],
)
def test_shares_cores_large_models_on_cpus_only(
    changes: dict[str, int],
    given: str | None,
    device: str,
    shares: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | changes))
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    config = Config()
    config.model.hf_path, config.cluster.device = str(tmp_path), device
    assert shares_cores(config) == shares


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "peers", "threads"), [("", 1, CORES), ("import torch", CORES, 1), ("", 3 * CORES, 1)]
)
def test_share_cores_sets_threads_of_process_and_children(first: str, peers: int, threads: int) -> None:
    code = TELL.format(first=first, peers=peers)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [str(threads)] * 2


def test_sglang_ranks_have_separate_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 5, 6, 7, 9})
    assert _cores(2, "2") == ["4,5", "6,7"]
    assert _cores(3, "2") == ["4,5", "6,7", "9,4"]
    assert _cores(1, "64") == ["4,5,6,7,9"]
    assert _cores(1, "2,4") == ["4,5"]
    assert [_cores(1, threads) for threads in ("0", "", "many")] == [["4"]] * 3


def test_process_environment_compiles_and_orders_kernels_on_gpus_only() -> None:
    """vLLM's compilation wrapper refuses to start under TORCHDYNAMO_DISABLE."""
    on_gpus, on_cpu = process_environment(on_gpus=True), process_environment(on_gpus=False)
    assert (on_gpus.get("TORCHDYNAMO_DISABLE"), on_gpus["CUDA_DEVICE_MAX_CONNECTIONS"]) == (None, "1")
    assert (on_cpu["TORCHDYNAMO_DISABLE"], on_cpu.get("CUDA_DEVICE_MAX_CONNECTIONS")) == ("1", None)
