"""Benchmarks by name. Each one is a module with `run() -> list[Result]` and runs in its own process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """Entry of the registry.

    timeout_seconds: several times the duration on two idle cores.
    gpu: whether the benchmark needs a GPU.
    """

    module: str
    timeout_seconds: int
    about: str
    gpu: bool = False


BENCHMARKS = {
    "packing": Benchmark("benchmarks.driver.packing", 300, "balance and pack 8,192 sequences"),
    "driver": Benchmark("benchmarks.driver.driver", 600, "driver work per step, 8,192 prompts x 16 samples"),
    "routing": Benchmark("benchmarks.rollout.routing", 300, "131,072 requests on 512 simulated engines"),
    "async_driver": Benchmark("benchmarks.asynchronous.driver", 900, "async rollouts on 8 to 512 simulated engines"),
    "advantages": Benchmark("benchmarks.training.advantages", 300, "GRPO vs scatter, GAE vs reading its inputs"),
    "losses": Benchmark("benchmarks.training.losses", 300, "every policy loss on 2^20 tokens vs ppo_clip"),
    "logprobs": Benchmark("benchmarks.training.logprobs", 900, "chunked log-probs and entropy vs the matrix product"),
    "masked_logprobs": Benchmark(
        "benchmarks.training.masked_logprobs", 900, "log-probs over kept tokens vs all tokens"
    ),
    "actor": Benchmark("benchmarks.training.actor", 900, "update and log-prob pass of one rank vs PyTorch"),
    "pipeline": Benchmark("benchmarks.training.pipeline", 600, "bubble of a two-stage pipeline vs the formula"),
    "convert": Benchmark("benchmarks.conversion.convert", 600, "HF to Megatron and back vs safetensors and memcpy"),
    "mbridge": Benchmark("benchmarks.conversion.mbridge", 600, "the same conversions vs mbridge"),
    "transforms": Benchmark("benchmarks.conversion.transforms", 300, "fused QKV and expert weights vs memcpy"),
    "handover": Benchmark("benchmarks.sync.handover", 300, "weights through shared memory vs memcpy"),
    "network": Benchmark("benchmarks.sync.network", 600, "weights between hosts vs a raw socket and the minimum"),
    "delta": Benchmark("benchmarks.sync.delta", 300, "bytes of changed weights vs all weights"),
    "delta_link": Benchmark("benchmarks.sync.delta_link", 900, "changed weights at 1 Gbit/s vs all weights"),
    "refit": Benchmark("benchmarks.sync.refit", 600, "weights of two expert-parallel ranks to two engines vs mbridge"),
    "plan": Benchmark("benchmarks.driver.plan", 300, "plan of 512 trainer ranks"),
    "engine_loop": Benchmark("benchmarks.rollout.engine_loop", 1200, "our loop on vLLM vs batches and LLM.generate"),
    "drafts": Benchmark("benchmarks.rollout.drafts", 1200, "long responses with drafts vs the same without"),
    "episodes": Benchmark("benchmarks.rollout.episodes", 1200, "episodes vs single turns, engines with slow tools"),
    "gateway": Benchmark("benchmarks.rollout.gateway", 1200, "programs behind the gateway vs the same coroutines"),
    "sglang_steps": Benchmark("benchmarks.rollout.sglang_steps", 1200, "our loop on SGLang vs its Engine and server"),
    "sglang_schedules": Benchmark("benchmarks.rollout.sglang_schedules", 1200, "SGLang's schedules, CPU per token"),
    "async_step": Benchmark("benchmarks.asynchronous.step", 3600, "asynchronous vs synchronous runs"),
    "whole_step": Benchmark("benchmarks.whole_step.step", 1800, "a whole training step vs TRL"),
    "gpu_updates": Benchmark("benchmarks.gpu.updates", 1800, "updates that fill a GPU vs a matrix product", gpu=True),
    "gpu_memory": Benchmark("benchmarks.gpu.memory", 1800, "peak memory of an update vs the plan", gpu=True),
    "gpu_logprobs": Benchmark("benchmarks.gpu.logprobs", 300, "log-probs vs their matrix product", gpu=True),
    "gpu_host_optimizer": Benchmark(
        "benchmarks.gpu.host_optimizer", 900, "optimizer state in host memory vs the bus", gpu=True
    ),
    "gpu_handover": Benchmark("benchmarks.gpu.handover", 600, "GPU to shared memory to GPU vs a copy", gpu=True),
    "gpu_ipc": Benchmark("benchmarks.gpu.ipc", 300, "memory of another process on the GPU vs a copy", gpu=True),
}
