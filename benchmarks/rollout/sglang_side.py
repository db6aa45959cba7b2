"""Child process of sglang_steps: `python -m benchmarks.rollout.sglang_side ours|engine|server MODEL REQUESTS`.

`ours` runs in this environment, `engine` and `server` in SGLang's. Each line on stdin starts a pass over all requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_rl.types import Completion

Request = tuple[list[int], int, int]
"""Prompt, response tokens, seed."""
Generate = Callable[[list[Request]], int]
"""Runs requests and returns the number of generated tokens."""

RUNNING, PROMPT_TOKENS, LONGEST = 64, 24, 256
SHIM = "from mcore_rl.engines.sglang.devices import cpu_patches\ncpu_patches.prepare()\n"
"""Code for all processes of SGLang, which otherwise cannot be imported on a CPU."""
ARGUMENTS: dict[str, str | float] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "skip_tokenizer_init": True,
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "max_total_tokens": RUNNING * (PROMPT_TOKENS + LONGEST),
    "max_running_requests": RUNNING,
    "mem_fraction_static": 0.3,
    "log_level": "error",
}
"""Arguments as in engines.sglang.engine."""


def ours(model: str) -> Generate:
    import numpy as np

    from mcore_rl.config.schema import RolloutConfig
    from mcore_rl.engines.settings import EngineSettings
    from mcore_rl.engines.sglang.engine import SglangEngine
    from mcore_rl.types import GenerationRequest, SamplingOptions

    config = RolloutConfig(
        engine="sglang",
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=LONGEST,
        max_concurrent_requests=RUNNING,
        kv_cache_gib=0.25,
    )
    engine = SglangEngine(EngineSettings(model, config, dtype="float32", seed=1, timeout_seconds=600))

    def generate(requests: list[Request]) -> int:
        done: list[Completion] = []
        given = [
            GenerationRequest(str(i), np.array(prompt, np.int32), seed, SamplingOptions(length))
            for i, (prompt, length, seed) in enumerate(requests)
        ]
        engine.generate(given, done.append)
        return sum(len(each.token_ids) for each in done)

    return generate


def engine(model: str) -> Generate:
    """Return a function that runs requests on SGLang's unmodified Engine."""
    # Before SGLang is imported, here and in its child processes.
    _see_shim()
    from mcore_rl.engines.sglang.devices import cpu_patches

    cpu_patches.prepare()
    import sglang

    running = sglang.Engine(model_path=model, **ARGUMENTS)

    def generate(requests: list[Request]) -> int:
        outputs = running.generate(
            input_ids=[prompt for prompt, _, _ in requests],
            sampling_params=[_sampling(length) for _, length, _ in requests],
            return_logprob=True,
        )
        return sum(len(each["output_ids"]) for each in outputs)

    return generate


def server(model: str) -> Generate:
    _see_shim()
    # Below the range from which Linux assigns ports to clients.
    port = 20_000 + os.getpid() % 10_000
    flags = [f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in ARGUMENTS.items()]
    command = [sys.executable, "-m", "sglang.launch_server", f"--model-path={model}", f"--port={port}", *flags]
    process = subprocess.Popen([*command, "--host=127.0.0.1", "--skip-server-warmup"], stdout=sys.stderr)
    while not _answers(port):  # it loads the model
        if process.poll() is not None:
            raise RuntimeError("SGLang's server has ended")
        time.sleep(0.5)
    pool = ThreadPoolExecutor(RUNNING)  # its threads count as cost of the client, as our loop counts for ours

    def one(request: Request) -> int:
        prompt, length, _ = request
        body = json.dumps({"input_ids": prompt, "sampling_params": _sampling(length), "return_logprob": True})
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}/generate", body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked) as answer:
            return len(json.load(answer)["output_ids"])

    return lambda requests: sum(pool.map(one, requests))


def _sampling(length: int) -> dict[str, float]:
    return {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _see_shim() -> None:
    """Make child processes import the shim first."""
    directory = tempfile.mkdtemp(prefix="mcore_rl_shim_")
    Path(directory, "sitecustomize.py").write_text(SHIM)
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([directory, os.getcwd()]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def main(way: str, model: str, requests: str) -> None:
    generate = {"ours": ours, "engine": engine, "server": server}[way](model)
    asked: list[Request] = json.loads(Path(requests).read_text())
    for _ in sys.stdin:
        tokens = sum(generate(asked[start : start + RUNNING]) for start in range(0, len(asked), RUNNING))
        print(json.dumps({"tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
