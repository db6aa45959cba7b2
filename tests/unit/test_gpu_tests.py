"""`make gpu` without a GPU: every test is collected and skipped with its missing requirement; no benchmark fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache

from tests.readme import ROOT

CUDA = "needs a CUDA device"
NEEDS = {
    "test_transformer_engine.py": f"{CUDA}; needs transformer-engine",
    "test_train.py": f"{CUDA}; needs transformer-engine; needs vLLM for CUDA",
    "test_disaggregated.py": "needs 2 GPUs, this machine has 0; needs transformer-engine; needs vLLM for CUDA",
    "test_ranks.py": "needs 2 GPUs, this machine has 0",
    "test_weight_sync.py": "needs 2 GPUs, this machine has 0",
    "test_visible_devices.py": "needs 2 GPUs, this machine has 0; needs vLLM for CUDA",
}
"""Skip reasons of files whose tests need more than one GPU, or something else."""
TWO_RANKS = re.compile(r"test_(engines|sglang)\.py::.*, 2\)")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    environment.pop("MCORE_RL_GPU_TESTS_ON", None)
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@cache
def reasons() -> dict[str, str]:
    """Return {test without its folder: reason why it was skipped}."""
    done = run("pytest", "tests/gpu", "-q", "-ra", "--no-fold-skipped", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    skipped = re.findall(r"^SKIPPED tests/gpu/(.+?) - (?:Skipped: )?(.+)$", done.stdout, flags=re.MULTILINE)
    assert f"{len(skipped)} skipped in" in done.stdout, done.stdout  # and none passed
    return dict(skipped)


def test_every_file_of_tests_is_collected() -> None:
    files = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert len(files) > 8
    assert {name.partition("::")[0] for name in reasons()} == files


def test_each_test_says_what_it_needs() -> None:
    wrong = {}
    for name, reason in reasons().items():
        file = name.partition("::")[0]
        if file == "test_engines.py":
            devices = "needs 2 GPUs, this machine has 0" if TWO_RANKS.search(name) else CUDA
            needed = devices if _has_vllm() else f"{devices}; needs vLLM for CUDA"
        elif file == "test_sglang.py":
            needed = f"{'needs 2 GPUs, this machine has 0' if TWO_RANKS.search(name) else CUDA}; needs SGLang for CUDA"
        elif name.endswith("[sglang]"):
            needed = NEEDS[file].replace("vLLM", "SGLang")
        else:
            needed = NEEDS.get(file, CUDA)
        if reason != needed:
            wrong[name] = reason
    assert wrong == {}


def _has_vllm() -> bool:
    from mcore_rl.resolved.installed import version_of

    return version_of(["vllm"]) is not None


def test_benchmarks_of_a_gpu_are_skipped_for_the_same_reason() -> None:
    done = run("benchmarks", "--gpu", "--save")
    assert done.returncode == 0, done.stdout
    assert len(re.findall(rf"^gpu_\w+: skipped: {CUDA}$", done.stdout, flags=re.MULTILINE)) >= 6
    assert "results:" not in done.stdout  # without measurements nothing is saved
