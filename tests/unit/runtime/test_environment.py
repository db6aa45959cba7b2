"""What the processes of a run find in their environment."""

from __future__ import annotations

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.runtime.cluster import process_environment


def test_gpus_have_compiled_kernels_and_graphs_unless_that_is_refused() -> None:
    """vLLM's compilation wrapper refuses to start under TORCHDYNAMO_DISABLE."""
    assert "TORCHDYNAMO_DISABLE" not in process_environment(on_gpus=True)
    assert not RolloutConfig().enforce_eager
    assert process_environment(on_gpus=False)["TORCHDYNAMO_DISABLE"] == "1"


def test_kernels_start_in_the_order_of_their_calls_on_gpus_only() -> None:
    assert process_environment(on_gpus=True)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in process_environment(on_gpus=False)
