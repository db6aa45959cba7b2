"""The benchmarks by name. Each is a module with `run() -> list[Result]`, run in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """`timeout_seconds` is several times what it takes on two idle cores. `gpu`: it needs one."""

    module: str
    timeout_seconds: int
    about: str
    gpu: bool = False


BENCHMARKS = {
    "packing": Benchmark("benchmarks.packing", 300, "balance + pack 8,192 sequences"),
    "driver": Benchmark("benchmarks.driver", 600, "the driver's own work per step, 8,192 prompts x 16 samples"),
    "routing": Benchmark("benchmarks.routing", 300, "131,072 requests over 512 simulated engines"),
    "async_driver": Benchmark("benchmarks.async_driver", 900, "asynchronous rollouts over 8 to 512 simulated engines"),
    "advantages": Benchmark("benchmarks.advantages", 300, "GRPO beside the scatter form, GAE beside reading arrays"),
    "losses": Benchmark("benchmarks.losses", 300, "every policy loss on 2^20 tokens, beside ppo_clip"),
    "logprobs": Benchmark("benchmarks.logprobs", 900, "log-probability + entropy in chunks, beside the bare product"),
    "actor": Benchmark("benchmarks.actor", 900, "an update and a log-probability pass of one rank, beside PyTorch"),
    "pipeline": Benchmark("benchmarks.pipeline", 600, "the bubble of a two-stage pipeline, beside the formula"),
    "convert": Benchmark("benchmarks.convert", 600, "HF files to megatron and back, beside safetensors and memcpy"),
    "mbridge": Benchmark("benchmarks.mbridge", 600, "the same conversions beside mbridge"),
    "transforms": Benchmark("benchmarks.transforms", 300, "fused QKV and expert weights, beside one memcpy"),
    "handover": Benchmark("benchmarks.handover", 300, "weights through shared memory, beside one memcpy"),
    "network": Benchmark("benchmarks.network", 600, "weights between hosts, beside a raw socket and the floor"),
    "refit": Benchmark("benchmarks.refit", 600, "weights of two expert-parallel ranks to two engines, beside mbridge"),
    "plan": Benchmark("benchmarks.plan", 300, "the plan of 512 trainer ranks"),
    "engine_loop": Benchmark("benchmarks.engine_loop", 1200, "our loop over vLLM, beside batches and LLM.generate"),
    "episodes": Benchmark("benchmarks.episodes", 1200, "episodes beside single turns, engines beside slow tools"),
    "sglang_steps": Benchmark("benchmarks.sglang_steps", 1200, "SGLang by our loop, beside its Engine and its server"),
    "async_step": Benchmark("benchmarks.async_step", 3600, "runs that generate while they train, beside taking turns"),
    "whole_step": Benchmark("benchmarks.whole_step", 1800, "a whole step, beside TRL"),
    "gpu_updates": Benchmark(
        "benchmarks.gpu.updates", 1800, "updates that fill a GPU, beside a matrix product", gpu=True
    ),
    "gpu_memory": Benchmark("benchmarks.gpu.memory", 1800, "the peak of an update, beside the plan's", gpu=True),
    "gpu_logprobs": Benchmark(
        "benchmarks.gpu.logprobs", 300, "log-probabilities, beside their matrix product", gpu=True
    ),
    "gpu_host_optimizer": Benchmark(
        "benchmarks.gpu.host_optimizer", 900, "a step with its state in host memory, beside the bus", gpu=True
    ),
    "gpu_handover": Benchmark("benchmarks.gpu.handover", 600, "GPU to shared memory to GPU, beside a copy", gpu=True),
    "gpu_ipc": Benchmark("benchmarks.gpu.ipc", 300, "another process's memory on the GPU, beside a copy", gpu=True),
}
