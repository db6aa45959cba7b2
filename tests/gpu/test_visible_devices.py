"""A run that may use only some GPUs of a machine uses exactly these, engines included."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.e2e.runs import TrainProcess, write_task

pytestmark = [pytest.mark.gpus(2), pytest.mark.vllm]

USED_MIB = 300
"""More than the fluctuations of other processes, less than a CUDA context with a tiny model."""
SHORT = ("trainer.steps=1", "trainer.prompts_per_step=4", "trainer.prompts_per_update=4", "data.val=null")


def used_mib() -> list[int]:
    """Return the used memory of every GPU of this machine, visible or not."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(command, text=True).split()]


def test_the_upper_half_of_the_gpus_is_all_that_a_run_touches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Example: on a node of eight GPUs, CUDA_VISIBLE_DEVICES=4,5,6,7."""
    count = torch.cuda.device_count()
    visible = range(count // 2, count)
    config = write_task(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, visible)))
    before = peak = used_mib()
    ranks = [f"cluster.gpus_per_node={len(visible)}", "cluster.device=cuda", "actor.parallel.ep=1"]
    engines = [f"rollout.num_engines={len(visible)}", "rollout.gpu_memory_fraction=0.3"]
    with TrainProcess(config, tmp_path / "run", (*SHORT, *ranks, *engines, "model.dtype=bfloat16")) as run:
        while run.process.poll() is None:
            peak = [max(pair) for pair in zip(peak, used_mib(), strict=True)]
        assert run.process.returncode == 0, run.text()[-4000:]
    touched = [gpu for gpu in range(count) if peak[gpu] - before[gpu] > USED_MIB]
    assert touched == list(visible)
