"""Weight sync into real engines: after each update an engine computes with exactly the trainer's weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.weights.frozen import ALL_TRAINED, TrainedWeights
from tests.contract.engines import MARKS, RemoteEngine
from tests.contract.expert_layouts import layouts_read_wrongly
from tests.contract.hf_trainer import HFTrainer
from tests.contract.update_checks import TINY_BUCKET, break_update, check_greedy, check_recovery, check_silent_rank
from tests.selection import on_demand_unless
from tests.tiny_models import VOCABULARY, tiny_model

MODELS = {
    # A tied head is packed separately from the embedding that it shares. qwen3 adds grouped heads.
    "dense_tied": ("qwen3", "float32", {"tie_word_embeddings": True}),
    "moe": ("qwen3_moe", "float32", {}),
    "dense_bf16": ("qwen3", "bfloat16", {"num_hidden_layers": 2}),
    "moe_bf16": ("qwen3_moe", "bfloat16", {"num_hidden_layers": 2}),
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
"""Of an FP8 release. The trainer dequantizes the weights, so the engine must not expect FP8."""


class Session:
    """An engine and its model. Every test publishes weights of its own."""

    def __init__(self, process: RemoteEngine, name: str, directory: Path) -> None:
        self.family, self.dtype, self.changes = MODELS[name]
        self.model(seed=99).save_pretrained(directory)
        config = directory / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": FP8}))
        # As in a run, the engine starts with random weights and gets its first weights by sync.
        self.engine = process.start(directory, self.dtype, load_weights=False)

    def model(self, seed: int) -> Any:
        return tiny_model(self.family, head_dim=32, seed=seed, **self.changes).to(getattr(torch, self.dtype))

    def trainer(self, seed: int, bucket_bytes: int, num_slots: int, trained: TrainedWeights = ALL_TRAINED) -> HFTrainer:
        return HFTrainer(self.model(seed), self.engine, bucket_bytes, num_slots, trained=trained)


TESTED = {"vllm": ("moe", "dense_bf16"), "sglang": ("moe",)}
"""Always tested; for vLLM both architectures and both dtypes. An SGLang process takes 14 CPU seconds to start."""
SESSIONS = [
    pytest.param((kind, name), id=f"{kind}-{name}", marks=[*marks, *on_demand_unless(name in TESTED[kind])])
    for kind, marks in MARKS.items()
    for name in MODELS
]


@pytest.fixture(scope="module", params=SESSIONS)
def session(
    request: pytest.FixtureRequest,
    process_of: Callable[[str], RemoteEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Session:
    kind, name = request.param
    return Session(process_of(kind), name, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("bucket_bytes", "num_slots"), [(1 << 20, 2), (100 << 10, 16), (TINY_BUCKET, 2), (40 << 10, 1)]
)
def test_update_three_in_a_row_are_exact(session: Session, bucket_bytes: int, num_slots: int) -> None:
    trainer = session.trainer(bucket_bytes, bucket_bytes, num_slots)
    for version in (1, 2, 3):
        trainer.publish(version)
        trainer.overwrite_buffers()  # the engine must not read the buffers after the update
        assert session.engine.weight_version == version
        if session.dtype == "float32":
            check_greedy(session.engine, trainer.model, version)
        assert trainer.certify() > 10
        trainer.perturb(version)
        with pytest.raises(WeightSyncError, match="differ"):
            trainer.certify()


def test_update_without_frozen_weights_is_exact(session: Session) -> None:
    """Adapters train all projections of attention and dense MLPs; the engine keeps its experts, head and embedding."""
    trainer = session.trainer(4, 40 << 10, 2, TrainedWeights(adapters=()))
    first_round = trainer.plan.first_trained_round
    assert 0 < first_round < trainer.plan.num_rounds
    trainer.publish(1)
    for version in (2, 3):
        trainer.perturb(version)
        trainer.publish(version, first_round)
        trainer.overwrite_buffers()
        if session.dtype == "float32":
            check_greedy(session.engine, trainer.model, version)
        assert trainer.certify() > 10
    with trainer.sending(complete=False, first_round=first_round):
        session.engine.call("begin_update", first_round)
        session.engine.call("receive_bucket", first_round)
    trainer.connect()  # after a broken update, the engine still holds the frozen weights
    trainer.publish(4, first_round)
    trainer.certify()
    with torch.no_grad():
        trainer.model.model.norm.weight += 1
    with pytest.raises(WeightSyncError, match=r"1 differ: model\.norm\.weight$"):
        trainer.certify()


def _freeze_keys(engine: Any) -> None:
    """Expect updates without the keys of one layer, which vLLM fuses with queries and values."""
    loader = engine._engine.model_executor.driver_worker.worker._loader
    with loader.context():
        loader.keep(
            [each for kept in loader._kept.values() for each in kept], ["model.layers.1.self_attn.k_proj.weight"]
        )


def test_frozen_part_of_a_fused_module_is_refused(session: Session) -> None:
    if session.engine.kind != "vllm":
        pytest.skip("SGLang loads parts of modules")
    session.trainer(4, 1 << 20, 2).publish(1)
    with pytest.raises(WeightSyncError, match=r"only parts of model\.layers\.1\.self_attn\.qkv_proj are frozen"):
        session.engine.call(_freeze_keys)


def _corrupt_linear(engine: Any) -> None:
    """Change one element of a packed projection, as an incorrect conversion would."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    from mcore_rl.engines.vllm.held_weights import _weight

    worker = engine._engine.model_executor.driver_worker.worker
    layer = worker.model_runner.get_model().get_submodule("model.layers.1.self_attn.qkv_proj")
    weight = _weight(layer).clone(memory_format=torch.contiguous_format)
    weight[layer.num_heads * layer.head_size, 3] += 0.5  # first row of k
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)


def _parameter(engine: Any, name: str) -> torch.Tensor:
    model = engine._engine.model_executor.driver_worker.worker.model_runner.get_model()
    return dict(model.named_parameters())[name].data


def _corrupt_norm(engine: Any) -> None:
    _parameter(engine, "model.layers.0.input_layernorm.weight")[5] += 0.25


def _corrupt_embedding(engine: Any) -> None:
    _parameter(engine, "model.embed_tokens.weight")[VOCABULARY - 1, 0] += 0.25


def _corrupt_expert_element(engine: Any) -> None:
    _parameter(engine, "model.layers.1.mlp.experts.routed_experts.w2_weight")[6].view(-1)[0] += 0.25


def _swap_experts(engine: Any) -> None:
    weight = _parameter(engine, "model.layers.1.mlp.experts.routed_experts.w13_weight")
    weight[[2, 3]] = weight[[3, 2]]


CORRUPTIONS = [
    (_corrupt_linear, "dense moe", ["model.layers.1.self_attn.k_proj.weight"]),
    (_corrupt_norm, "dense moe", ["model.layers.0.input_layernorm.weight"]),
    (_corrupt_embedding, "dense moe", ["model.embed_tokens.weight"]),
    (_corrupt_expert_element, "moe", ["model.layers.1.mlp.experts.6.down_proj.weight"]),
    (
        _swap_experts,
        "moe",
        [f"model.layers.1.mlp.experts.{e}.{part}_proj.weight" for e in (2, 3) for part in ("gate", "up")],
    ),
]


@pytest.mark.parametrize(("corrupt", "models", "names"), CORRUPTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_compare_one_wrong_element_is_named(session: Session, corrupt: Any, models: str, names: list[str]) -> None:
    if session.engine.kind != "vllm":
        pytest.skip("looks into vLLM")
    if ("moe" if session.family == "qwen3_moe" else "dense") not in models.split():
        pytest.skip("the model has no experts")
    trainer = session.trainer(5, 1 << 20, 2)
    trainer.publish(5)
    trainer.certify()
    session.engine.call(corrupt)
    with pytest.raises(WeightSyncError) as caught:
        trainer.certify()
    assert f"{len(names)} differ: {', '.join(sorted(names))}" in str(caught.value)
    trainer.publish(6)  # an update corrects it
    trainer.certify()


def break_points(trainer: HFTrainer) -> list[int]:
    """Return rounds at the first bucket, in the embedding, within and between layers, and at the last bucket."""
    num_buckets = trainer.plan.num_rounds
    return [0, 1, *range(4, num_buckets - 1, max(1, num_buckets // 5)), num_buckets - 1, num_buckets]


def test_compare_reads_experts_in_the_layouts_of_gpus(session: Session) -> None:
    if session.engine.kind != "vllm":
        pytest.skip("layouts of vLLM's kernels")
    assert session.engine.call(layouts_read_wrongly) == []


def test_update_after_broken_update_is_complete(session: Session) -> None:
    """vLLM would silently continue an unfinished reload with wrong results."""
    trainer = session.trainer(5, TINY_BUCKET, 2)
    with pytest.raises(WeightSyncError, match="attached, not updating"):
        session.engine.call("receive_bucket", 0)
    for received in break_points(trainer):
        check_recovery(session.engine, trainer, received, greedy=session.dtype == "float32")
    # A new sender with another bucket size replaces the failed one.
    break_update(session.engine, trainer, 3)
    check_recovery(session.engine, session.trainer(6, 40 << 10, 2), 1, greedy=session.dtype == "float32")


def test_sglang_silent_rank_raises_in_time_and_disables_engine(session: Session) -> None:
    """Must be the last test of the engine: the engine is unusable afterwards. test_two_ranks.py tests vLLM."""
    if session.engine.kind != "sglang":
        pytest.skip("vLLM has no rank process of its own")
    session.trainer(7, 1 << 20, 2).publish(7)
    check_silent_rank(session.engine, 0, "is_idle", "rank 0 did not answer")
