"""Output projection and routers of bfloat16 engines in float32 (model.float32_head, model.float32_router).

The layers of the model add nothing to the embeddings, so that the inputs of routers and output projection do not
depend on how an engine rounds elsewhere. What remains is compared with float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.errors import WeightSyncError
from mcore_rl.types import Completion, GenerationRequest, SamplingOptions
from tests.contract.engines import DIVIDED_BY_TWO, LATENT, ON_DEMAND, WITH_SGLANG, RemoteEngine
from tests.contract.hf_trainer import HFTrainer
from tests.tiny_models import OSS, VOCABULARY, YARN, tiny_model, write_tiny_model

FLOAT32 = {"float32_head": True, "float32_router": True}
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 1024, "num_experts_per_tok": 8}
ONE_GROUP = {"n_routed_experts": 128, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": SIZES | DIVIDED_BY_TWO | {"num_experts": 128},
    "deepseek_v3": SIZES | DIVIDED_BY_TWO | LATENT | ONE_GROUP | {"rope_parameters": YARN},
}
WHOLE_BLOCKS = {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 256}
# float32 logits of up to 20, added in another order
TOLERANCE = 3e-5


def build_model(family: str, *, tied: bool) -> Any:
    """Build a model in bfloat16 whose largest logits are about 15, like those of a trained one."""
    model = tiny_model(family, seed=3, tie_word_embeddings=tied, **MODELS[family])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        # Signs instead of ones: with tied embeddings, a token would otherwise predict itself.
        model.model.norm.weight.copy_(1 - 2 * (torch.arange(128) % 3 == 0).float())
    return model.bfloat16()


def make_requests() -> list[GenerationRequest]:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, VOCABULARY, size=20).astype(np.int32) for _ in range(16)]
    # The sampled token is not always the most probable one.
    return [GenerationRequest(str(i), prompt, i, SamplingOptions(24)) for i, prompt in enumerate(prompts)]


def normed(norm: Any, hidden: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute a norm with weights of 1 or -1 in bfloat16 as the engine `kind` rounds it: vLLM's kernels for CPUs
    without AVX-512 truncate."""
    if kind != "vllm" or torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability() == "AVX512":
        return norm(hidden)
    exact = hidden.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight.float()
    return (exact.view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()


def logp_errors(model: Any, kind: str, requests: list[GenerationRequest], done: dict[str, Completion]) -> np.ndarray:
    """Compute the differences between the engine's log-probabilities and those of float64 logits, of all tokens."""
    errors = []
    for request in requests:
        completion = done[request.request_id]
        ids = torch.from_numpy(np.concatenate([request.token_ids, completion.token_ids]).astype(np.int64))
        with torch.no_grad():
            hidden = normed(model.model.norm, model.model.embed_tokens(ids[len(request.token_ids) - 1 : -1]), kind)
            logits = hidden.double() @ model.lm_head.weight.double().t()
        logp = logits.log_softmax(-1).gather(1, ids[len(request.token_ids) :, None])[:, 0]
        errors.append(np.abs(completion.logp - logp.numpy()))
    return np.concatenate(errors)


def different_experts(model: Any, kind: str, requests: list[GenerationRequest], done: dict[str, Completion]) -> float:
    """Compute the share of tokens and layers whose experts are not the best ones of float64 logits."""
    differ = []
    for request in requests:
        completion = done[request.request_id]
        ids = np.concatenate([request.token_ids, completion.token_ids[:-1]]).astype(np.int64)
        for index, layer in enumerate(model.model.layers):
            with torch.no_grad():
                hidden = normed(layer.post_attention_layernorm, model.model.embed_tokens(torch.from_numpy(ids)), kind)
                scores = hidden.double() @ layer.mlp.gate.weight.double().t()
                if hasattr(layer.mlp.gate, "e_score_correction_bias"):
                    scores = scores.sigmoid() + layer.mlp.gate.e_score_correction_bias.double()
                best = scores.topk(8).indices
            assert completion.routed_experts is not None
            found = np.sort(completion.routed_experts[:, index], -1)
            differ.append((found != best.sort(-1).values.numpy()).any(-1))
    return float(np.concatenate(differ).mean())


@pytest.mark.parametrize(
    ("process", "keys", "family"),
    [
        pytest.param("vllm", FLOAT32, "qwen3_moe", id="vllm"),
        pytest.param("vllm", {}, "qwen3_moe", id="vllm-bfloat16"),
        pytest.param("vllm", FLOAT32, "deepseek_v3", id="vllm-deepseek_v3"),
        pytest.param("vllm", FLOAT32 | {"tp": 2}, "qwen3_moe", id="vllm-tp2", marks=ON_DEMAND),
        pytest.param("sglang", FLOAT32, "qwen3_moe", id="sglang", marks=WITH_SGLANG),
    ],
    indirect=["process"],
)
def test_head_and_routers_in_float32_equal_float64(
    process: RemoteEngine, keys: dict[str, Any], family: str, tmp_path: Path
) -> None:
    model = build_model(family, tied=False)
    model.save_pretrained(tmp_path)
    engine = process.start(tmp_path, "bfloat16", capture_routing=True, **keys)
    requests = make_requests()
    done = engine.generate(requests)
    errors, share = (
        logp_errors(model, process.kind, requests, done),
        different_experts(model, process.kind, requests, done),
    )
    print(f"{process.kind} {keys}: mean |log p - log q| {errors.mean():.1e}, experts differ for {share:.1%}")
    if keys:
        assert errors.max() < TOLERANCE
        assert share == 0
    else:  # the controls, and figures of docs/low-precision.md
        assert errors.mean() > 100 * TOLERANCE
        assert share > 0.01


def _change_head(engine: Any) -> None:
    """Change the output weights that a vLLM engine multiplies in float32, but not their packed copy."""

    def change(worker: Any) -> None:
        worker.model_runner.model.lm_head.weight.data[3, 5] += 1

    engine._engine.model_executor.collective_rpc(change)


@pytest.mark.parametrize("process", ["vllm"], indirect=True)
@pytest.mark.parametrize("tied", [True, False])
def test_float32_engine_receives_and_certifies_weights(process: RemoteEngine, tied: bool, tmp_path: Path) -> None:
    """The kernels read the output weights and the routers themselves, not packed copies."""
    model = build_model("qwen3_moe", tied=tied)
    model.save_pretrained(tmp_path)
    engine = process.start(tmp_path, "bfloat16", load_weights=False, capture_routing=True, **FLOAT32)
    trainer = HFTrainer(model, engine, 40 << 10, 2)
    with pytest.raises(WeightSyncError, match="the engine has no weights yet"):
        engine.generate(make_requests())
    trainer.publish(1)
    assert trainer.certify() > 10
    requests = make_requests()
    done = engine.generate(requests)
    assert logp_errors(model, process.kind, requests, done).max() < TOLERANCE
    assert different_experts(model, process.kind, requests, done) == 0
    if not tied:
        engine.call(_change_head)
        with pytest.raises(WeightSyncError, match="lm_head"):
            trainer.certify()


def _router_errors(engine: Any) -> list[float]:
    """Compare the routers of a vLLM engine with float64, for random inputs. Returns the largest relative errors."""
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    def errors(worker: Any) -> list[float]:
        found = []
        for module in worker.model_runner.model.modules():
            if isinstance(module, GateLinear):
                generator = torch.Generator().manual_seed(1)
                hidden = torch.randn(7, module.weight.shape[1], generator=generator).bfloat16()
                output = module(hidden)
                output = output[0] if isinstance(output, tuple) else output
                bias = 0 if module.bias is None else module.bias.double()
                expected = hidden.double() @ module.weight.double().t() + bias
                assert output.dtype == torch.float32
                found.append(float((output - expected).abs().max() / expected.abs().max()))
        return found

    result: list[float] = engine._engine.model_executor.collective_rpc(errors)[0]
    return result


@pytest.mark.parametrize("process", ["vllm"], indirect=True)
@pytest.mark.parametrize(
    ("family", "fields", "keys"),
    [
        ("gpt_oss", OSS | {"head_dim": 32}, {}),  # a router with biases
        ("qwen3_moe", WHOLE_BLOCKS, {"quantization": "fp8", "load_weights": False}),
        ("qwen3_moe", MODELS["qwen3_moe"], {"quantization": "int4", "quantization_group": 32, "load_weights": False}),
    ],
    ids=["gpt_oss", "fp8", "int4"],
)
def test_vllm_routers_in_float32_equal_float64(
    process: RemoteEngine, family: str, fields: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, family, **({"hidden_size": 128, "num_hidden_layers": 2} | fields))
    engine = process.start(tmp_path, "bfloat16", **FLOAT32, **keys)
    errors = engine.call(_router_errors)
    engine.call(setattr, "weights_complete", True)  # random weights suffice
    engine.generate(make_requests()[:1])
    assert errors
    assert max(errors) < 1e-6
