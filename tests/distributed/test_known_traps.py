"""Silent errors of megatron-core 0.16.1: without the workaround the gradient differs from plain torch on transformers'
model, so the workaround is still needed. test_actor_gradients.py shows that the same layouts are correct with it.

- An interleaved pipeline on two stages without overlap_p2p_comm gives wrong gradients. `model._parallel_arguments`
  always sets it for interleaved pipelines.
- Latent attention with tensor parallelism but without sequence parallelism: the replicated down-projection has the
  gradient of one rank's heads only. `layout.train_layout` rejects it.
- Gradients are divided by the data-parallel size if calculate_per_token_loss is set after DistributedDataParallel was
  built. `optimizer.wrap_chunks` asserts that it is set before.
- Mixture-of-experts layers with tensor parallelism but without sequence parallelism raise, but only in the first
  training step. `layout.train_layout` rejects them at the start.

Covered by other tests: test_cpu_backend.py (calls of CUDA, uneven collectives, the float32 router, latent attention
without TransformerEngine, steps of a reloaded optimizer), test_actor_update.py (one step count in all parameters),
test_recompute.py and tests/unit/resolved/test_implementation.py (blocks of layers that do not fill a stage).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import accumulate
from tests.distributed.launch import launch
from tests.tiny_models import YARN, write_tiny_model

WRONG = 1e-3  # relative to a tensor's largest entry; see test_actor_gradients.py
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    # No layer has experts: they would raise before the gradient is computed.
    "latent": ("deepseek_v3", {"rope_parameters": YARN, "first_k_dense_replace": 4}),
    "moe": ("qwen3_moe", {}),
}
WHOLE_SEQUENCES = {"tp": 2, "sequence_parallel": False}
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "interleaved without overlap": ("dense", {"pp": 2, "vpp": 2}, "overlap", ""),
    "latent on whole sequences": ("latent", WHOLE_SEQUENCES, "refusal", "kv_a_proj_with_mqa"),
    "data parallel, told late": ("dense", {}, "sum over tokens", ""),
}
"""Model, layout, the workaround that is removed, and part of the name of a tensor that has a wrong gradient."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(write_tiny_model(root / name, kind, **changes)) for name, (kind, changes) in MODELS.items()}


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, dict[str, float]]:
    """Difference of the gradient from transformers', relative to its largest entry, by case and tensor."""
    samples = policy_batch.UPDATES[0]
    expected = {kind: policy_batch.reference_gradients(directories[kind], samples)[1] for kind in ("dense", "latent")}
    ranks = launch(_gradients, 2, directories)
    errors = {}
    for case, (kind, *_) in CASES.items():
        found = policy_batch.assemble([rank[case] for rank in ranks])
        errors[case] = {
            name: float((found[name] - tensor).abs().max() / tensor.abs().max())
            for name, tensor in expected[kind].items()
        }
    return errors


def _gradients(rank: int, directories: dict[str, str]) -> dict[str, Any]:
    return {
        case: _gradient(directories[kind], parallel, removed) for case, (kind, parallel, removed, _) in CASES.items()
    }


def _gradient(directory: str, parallel: dict[str, Any], removed: str) -> list[Any]:
    actor = _build_without(removed, policy_batch.config(directory, parallel, 24))
    if parallel.get("vpp"):  # equal lengths; otherwise stages would fail on different shapes
        actor.packing = replace(actor.packing, row_multiple=32)
    accumulate(actor)
    return policy_batch.gradient_pieces(actor)


def _build_without(removed: str, config: Any) -> Any:
    from mcore_rl.megatron.optim import optimizer
    from mcore_rl.resolved import layout

    refuse, wrap = layout._check_sequence_parallel, optimizer.DistributedDataParallel

    class WrappedBeforeTelling(wrap):
        def __init__(self, model_config: Any, *args: Any, **options: Any) -> None:
            model_config.calculate_per_token_loss = False
            super().__init__(model_config, *args, **options)
            model_config.calculate_per_token_loss = True

    if removed == "refusal":
        layout._check_sequence_parallel = lambda *_: None
    if removed == "sum over tokens":
        optimizer.DistributedDataParallel = WrappedBeforeTelling
    try:
        actor = policy_batch.build_actor(config)
    finally:
        layout._check_sequence_parallel, optimizer.DistributedDataParallel = refuse, wrap
    if removed == "overlap":
        actor.chunks[0].config.overlap_p2p_comm, actor.chunks[0].config.batch_p2p_comm = False, True
    return actor


@pytest.mark.parametrize("case", CASES)
def test_gradients_without_workaround_are_silently_wrong(case: str, results: dict[str, dict[str, float]]) -> None:
    wrong = [name for name, error in results[case].items() if error > WRONG]
    assert wrong
    assert any(CASES[case][-1] in name for name in wrong)


def _train_experts_on_whole_sequences(rank: int, directory: str) -> str:
    try:
        _gradient(directory, WHOLE_SEQUENCES, "refusal")
    except ValueError as error:
        return str(error)
    return ""


def test_experts_without_sequence_parallelism_raise_in_the_first_step(directories: dict[str, str]) -> None:
    assert all(
        "sequence parallelism" in message
        for message in launch(_train_experts_on_whole_sequences, 2, directories["moe"])
    )


def test_wrap_chunks_without_per_token_loss_raises() -> None:
    from types import SimpleNamespace

    from mcore_rl.config.models import ActorConfig
    from mcore_rl.megatron.optim.optimizer import wrap_chunks

    chunk = SimpleNamespace(config=SimpleNamespace(calculate_per_token_loss=False))
    with pytest.raises(AssertionError):
        wrap_chunks([chunk], ActorConfig())
