"""Order of the GPU tests. A failure in one stage explains failures in later ones, so look at the first."""

from __future__ import annotations

STAGES: dict[str, tuple[str, ...]] = {
    # torch and kernels in one process
    "devices": (
        "test_profile.py",
        "test_logprobs.py",
        "test_noise.py",
        "test_fp8_codes.py",
        "test_attention.py",
        "test_transformer_engine.py",
    ),
    # memory that processes share, and transfers between them
    "connections": ("test_segments.py", "test_nccl.py", "test_weight_sync.py"),
    # Megatron ranks without engines
    "trainer": ("test_updates.py", "test_offload.py", "test_checkpoint.py", "test_ranks.py", "test_tools.py"),
    "vllm": ("test_engines.py",),
    # weights of a model on a GPU, from one process to another
    "handover": ("test_handover.py",),
    "sglang": ("test_sglang.py",),
    # complete runs of `mcore-rl train`
    "runs": ("test_train.py", "test_disaggregated.py", "test_visible_devices.py"),
}
"""Files by stage; each stage needs what the earlier ones test."""


def place_of(file: str) -> int:
    """Return the position of a file in the order; files that are not listed come last."""
    listed = [name for files in STAGES.values() for name in files]
    return listed.index(file) if file in listed else len(listed)
