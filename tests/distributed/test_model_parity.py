"""The model compared with transformers in each layout: logits, log-probabilities and all gradients.

One launch per number of ranks runs all its cases; the reference is transformers' model on unpacked sequences.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.config.models import ActorConfig, ParallelConfig
from tests.distributed import policy_batch
from tests.distributed.built import build
from tests.distributed.launch import launch
from tests.selection import EVERY_TEST
from tests.tiny_models import (
    GROUPS,
    LLAMA3,
    LONGROPE,
    VOCABULARY,
    YARN,
    checkpoint_tensors,
    correction_biases,
    write_tiny_model,
)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "dense": ("qwen3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    # The factor on cosines and sines is 1.04.
    "yarn": ("qwen3", {"rope_parameters": YARN | {"truncate": False}}),
    "moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "mixed": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    # No tp divides this vocabulary, and there are fewer key-value heads than tensor-parallel ranks.
    "odd": ("qwen3", {"vocab_size": VOCABULARY + 1, "num_key_value_heads": 1}),
    "odd biased": ("qwen2", {"vocab_size": VOCABULARY + 1, "tie_word_embeddings": True}),
    "v3": ("deepseek_v3", {}),
    "v3 yarn groups": ("deepseek_v3", {"rope_parameters": YARN, **GROUPS}),
    # Without a query latent, and with an epsilon that the latent norms must not use.
    "v3 no q latent": ("deepseek_v3", {"q_lora_rank": None, "n_shared_experts": 2, "rms_norm_eps": 1e-2}),
    # Five of up to 16 tokens, chosen by indexers with two kinds of rotation.
    "v3.2": ("deepseek_v32", {"rope_parameters": YARN, **GROUPS}),
    "glm5": ("glm_moe_dsa", {"rms_norm_eps": 1e-2}),
    "v2": ("deepseek_v2", {}),
    # Two of four groups of two experts, ranked by the better one; then three of these four.
    "v2 yarn groups": (
        "deepseek_v2",
        {"rope_parameters": YARN, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "oss": ("gpt_oss", {"pad_token_id": None}),
    "gemma": ("gemma3_text", {}),
    "gemma tied": ("gemma3_text", {"tie_word_embeddings": True}),
    "glm": ("glm4_moe", {}),
    "next": ("qwen3_next", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen3.5": ("qwen3_5_text", {"tie_word_embeddings": True}),
    # Fewer key-value heads than tensor-parallel ranks: each rank has a part of the group's queries and gates.
    "qwen3.5 moe": ("qwen3_5_moe_text", {"num_key_value_heads": 1}),
    # Three of eight experts with the weights of the full softmax, and a layer without experts.
    "qwen2 moe": ("qwen2_moe", {"mlp_only_layers": [1], "head_dim": 8}),
    "seed": ("seed_oss", {}),
    "glm lite": ("glm4_moe_lite", {}),
    "glm groups": ("glm4_moe", {"attention_bias": False, "use_qk_norm": False, **GROUPS}),
    # Norms over all heads, of which every tensor-parallel rank has a part.
    "minimax": ("minimax_m2", {}),
    # Dense layers 0 and 2; softmax scores with a correction bias.
    "ernie": ("ernie4_5_moe", {"moe_layer_interval": 2}),
    "ernie tied": (
        "ernie4_5_moe",
        {"tie_word_embeddings": True, "moe_num_shared_experts": 0, "moe_layer_end_index": 2},
    ),
}
ROTATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4}}),
    "dynamic": ("mixtral", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "short llama3": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "longrope ratio": ("qwen3_moe", {"rope_parameters": LONGROPE | {"factor": None}}),
    "attention factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.7}}),
    "partial yarn": ("glm4_moe", {"rope_parameters": YARN}),
}  # fmt: skip
"""Other rope types, on demand: unit tests compare their frequencies and factors."""
MODELS |= ROTATIONS if EVERY_TEST else {}
# Two micro-batches of different token counts; multiples of 4, because sequence parallelism divides them by tp.
MICROBATCHES = [[5, 12, 1, 6], [9, 3, 16]]
CASES: dict[int, dict[str, tuple[str, dict[str, int]]]] = {
    1: {name: (name, {}) for name in MODELS},
    2: {
        "llama tp2": ("llama", {"tp": 2}),
        "qwen2 tp2": ("qwen2", {"tp": 2}),
        "tied tp2": ("tied", {"tp": 2}),
        "tied pp2": ("tied", {"pp": 2}),
        "dense pp2 uneven": ("dense", {"pp": 2, "first_stage_layers": 1}),
        "moe tp2 ep2": ("moe", {"tp": 2, "ep": 2}),
        "mixed tp2 ep2": ("mixed", {"tp": 2, "ep": 2}),
        "odd tp2 without sequence parallelism": ("odd", {"tp": 2, "sequence_parallel": 0}),
        "mixtral tp2": ("mixtral", {"tp": 2}),
        "mixtral ep2": ("mixtral", {"ep": 2}),
        "v3 pp2 vpp2": ("v3 yarn groups", {"pp": 2, "vpp": 2}),
        "v3 tp2 ep2": ("v3 yarn groups", {"tp": 2, "ep": 2}),
        "v3 no q latent tp2": ("v3 no q latent", {"tp": 2}),
        "v3.2 tp2 ep2": ("v3.2", {"tp": 2, "ep": 2}),
        "glm5 pp2": ("glm5", {"pp": 2}),
        "v2 tp2 ep2": ("v2", {"tp": 2, "ep": 2}),
        "oss tp2": ("oss", {"tp": 2}),
        "oss pp2": ("oss", {"pp": 2}),
        "oss ep2": ("oss", {"ep": 2}),
        "oss tp2 ep2": ("oss", {"tp": 2, "ep": 2}),
        "gemma tp2": ("gemma", {"tp": 2}),
        "gemma pp2": ("gemma tied", {"pp": 2}),
        "next tp2 ep2": ("next", {"tp": 2, "ep": 2}),
        "qwen3.5 tp2 without sequence parallelism": ("qwen3.5", {"tp": 2, "sequence_parallel": 0}),
        "qwen3.5 pp2 vpp2": ("qwen3.5", {"pp": 2, "vpp": 2}),
        "qwen3.5 moe tp2": ("qwen3.5 moe", {"tp": 2}),
        "glm tp2": ("glm", {"tp": 2}),
        "glm tp2 ep2": ("glm groups", {"tp": 2, "ep": 2}),
        "minimax tp2": ("minimax", {"tp": 2}),
        "minimax tp2 without sequence parallelism": ("minimax", {"tp": 2, "sequence_parallel": 0}),
        "ernie tp2": ("ernie", {"tp": 2}),
        "ernie pp2": ("ernie tied", {"pp": 2}),
        "qwen2 moe tp2": ("qwen2 moe", {"tp": 2}),
        "seed tp2": ("seed", {"tp": 2}),
        "glm lite tp2 ep2": ("glm lite", {"tp": 2, "ep": 2}),
    },
    4: {
        "qwen3.5 moe tp2 ep2 etp2": ("qwen3.5 moe", {"tp": 2, "ep": 2, "etp": 2}),
        "moe tp2 ep2 etp2": ("moe", {"tp": 2, "ep": 2, "etp": 2}),
        "tied tp2 pp2": ("tied", {"tp": 2, "pp": 2}),
        "odd tp4": ("odd", {"tp": 4}),
        "odd biased tp4": ("odd biased", {"tp": 4}),
    },
}
ON_DEMAND: dict[int, dict[str, tuple[str, dict[str, int]]]] = {
    2: {
        "v3.2 pp2 vpp2": ("v3.2", {"pp": 2, "vpp": 2}),
        "glm5 tp2": ("glm5", {"tp": 2}),
        "glm5 ep2": ("glm5", {"ep": 2}),
        "llama pp2": ("llama", {"pp": 2}),
        "qwen2 pp2": ("qwen2", {"pp": 2}),
        "yarn tp2": ("yarn", {"tp": 2}),
        "yarn pp2": ("yarn", {"pp": 2}),
        "mixtral pp2": ("mixtral", {"pp": 2}),
        "next pp2": ("next", {"pp": 2}),
        "qwen3.5 moe pp2": ("qwen3.5 moe", {"pp": 2}),
        "qwen3.5 moe ep2": ("qwen3.5 moe", {"ep": 2}),
        "glm pp2": ("glm", {"pp": 2}),
        "glm ep2": ("glm", {"ep": 2}),
        "qwen2 moe pp2": ("qwen2 moe", {"pp": 2}),
        "qwen2 moe ep2": ("qwen2 moe", {"ep": 2}),
        "seed pp2": ("seed", {"pp": 2}),
        "glm lite pp2": ("glm lite", {"pp": 2}),
        "minimax pp2": ("minimax", {"pp": 2}),
        "minimax ep2": ("minimax", {"ep": 2}),
        "ernie ep2": ("ernie", {"ep": 2}),
    },
    4: {
        "qwen2 moe tp2 ep2 etp2": ("qwen2 moe", {"tp": 2, "ep": 2, "etp": 2}),
        "glm lite tp2 ep2 etp2": ("glm lite", {"tp": 2, "ep": 2, "etp": 2}),
        "minimax tp2 ep2 etp2": ("minimax", {"tp": 2, "ep": 2, "etp": 2}),
        "ernie tp2 ep2 etp2": ("ernie", {"tp": 2, "ep": 2, "etp": 2}),
    },
}
"""Further layouts of families. In the usual suite each family has one layout that divides its tensors, and pipelines
and experts without tensor parallelism have a few representatives."""
for _num_ranks, _cases in ON_DEMAND.items() if EVERY_TEST else ():
    CASES[_num_ranks] |= _cases


def _sequences() -> list[list[list[int]]]:
    generator = torch.Generator().manual_seed(11)
    return [
        [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
        for lengths in MICROBATCHES
    ]


def _row(microbatch: list[list[int]]) -> torch.Tensor:
    return torch.tensor([token for sequence in microbatch for token in sequence])


def _targets(tokens: torch.Tensor) -> torch.Tensor:
    """A different token for every position: arbitrary targets are as good a test as next tokens."""
    return (tokens * 7 + 3) % VOCABULARY


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: str(write_tiny_model(root / name, kind, seed=index, **changes))
        for index, (name, (kind, changes)) in enumerate(MODELS.items())
    }


@pytest.fixture(scope="module")
def references(directories: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Per model: logits by micro-batch, and gradients of the mean log-probability by HF name."""
    return {name: _reference(directory) for name, directory in directories.items()}


def _reference(directory: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    logits, total, count = [], torch.zeros(()), 0
    for microbatch in _sequences():
        rows = [model(torch.tensor(sequence)[None]).logits[0] for sequence in microbatch]
        logits.append(torch.cat(rows).detach().numpy())
        targets = _targets(_row(microbatch))
        logp = torch.cat(rows).log_softmax(-1).gather(1, targets[:, None])
        total, count = total + logp.sum(), count + len(targets)
    (total / count).backward()
    named = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    # Choices of an indexer have no gradient, so every rank keeps it frozen.
    biases = correction_biases(model)
    untrained = {name for name, parameter in model.named_parameters() if parameter.grad is None} - biases.keys()
    assert untrained == {name for name in named if ".indexer." in name}
    # Biases have no gradient and must be unchanged.
    named |= biases
    gradients = checkpoint_tensors(model, named)
    return {"logits": logits, "gradients": {name: gradient.numpy() for name, gradient in gradients.items()}}


# ---- on the ranks ----


def _run_cases(rank: int, cases: dict[str, tuple[str, dict[str, int]]]) -> dict[str, dict[str, Any]]:
    return {name: _run_case(rank, directory, sizes) for name, (directory, sizes) in cases.items()}


def _run_case(rank: int, directory: str, sizes: dict[str, int]) -> dict[str, Any]:
    from mcore_rl.megatron.model import loading

    hf_config = json.loads((Path(directory) / "config.json").read_text())
    sizes = dict(sizes)
    # Sequence parallelism, on by default with tp > 1, can be switched off.
    sequence_parallel = None if sizes.pop("sequence_parallel", 1) else False
    actor = ActorConfig(parallel=ParallelConfig(sequence_parallel=sequence_parallel))
    chunks, layout = build(hf_config, sizes, actor=actor)
    loading.load_hf(chunks, directory, layout)
    logits = _logits(chunks, hf_config["vocab_size"])
    _backward(chunks)
    return {"logits": logits, "gradients": _gradient_pieces(chunks, hf_config, layout, rank)}


def _schedule(chunks: list[Any], forward_step: Any, microbatches: list[Any], **options: Any) -> Any:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in chunks],
        model=chunks,
        num_microbatches=len(microbatches),
        seq_length=max(sum(lengths) for lengths in MICROBATCHES),
        micro_batch_size=1,
        **options,
    )


def _packed(microbatch: list[list[int]]) -> tuple[torch.Tensor, Any]:
    from mcore_rl.megatron.model.attention.packed import pack_sequences

    return _row(microbatch), pack_sequences([len(sequence) for sequence in microbatch])


def _logits(chunks: list[Any], vocab_size: int) -> list[np.ndarray] | None:
    """Logits of all micro-batches over the whole vocabulary without padding; None except on the last stage."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from mcore_rl.megatron.model.output import logits_emitted

    def forward_step(iterator: Any, chunk: Any) -> Any:
        tokens, packed = _packed(next(iterator))
        logits = chunk(tokens[None], None, None, packed_seq_params=packed)

        def whole(output: torch.Tensor, non_loss_data: bool) -> np.ndarray:
            return gather_from_tensor_model_parallel_region(output)[0, :, :vocab_size].numpy()

        return logits, whole

    with logits_emitted(chunks), torch.no_grad():
        return _schedule(chunks, forward_step, _sequences(), forward_only=True, collect_non_loss_data=True) or None


def _backward(chunks: list[Any]) -> None:
    """Compute the gradient of the mean log-probability and store it in the parameters' data."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from mcore_rl.megatron.model.output import output_weight, unwrap
    from mcore_rl.megatron.step.logprobs import linear_logp_entropy

    group = parallel_state.get_tensor_model_parallel_group()
    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

    def forward_step(iterator: Any, chunk: Any) -> Any:
        tokens, packed = _packed(next(iterator))
        output = chunk(tokens[None], None, None, packed_seq_params=packed)

        def loss(hidden: torch.Tensor) -> Any:
            vocab_size = unwrap(chunk).unpadded_vocab_size
            logp, _ = linear_logp_entropy(
                hidden, output_weight(chunk), _targets(tokens), group=group, vocab_size=vocab_size
            )
            return logp.sum(), torch.tensor(len(tokens), dtype=torch.int), {}

        return output, loss

    wrapped = [DistributedDataParallel(c.config, DistributedDataParallelConfig(), c) for c in chunks]
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    _schedule(wrapped, forward_step, _sequences()[replica::replicas], forward_only=False)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad if parameter.requires_grad else torch.zeros(()))


def _gradient_pieces(chunks: list[Any], hf_config: dict[str, Any], layout: Any, rank: int) -> list[Any]:
    from mcore_rl.megatron.model.names import canonical_tensors
    from model_converters.families import family_for
    from model_converters.mapping.plan import export_pieces, export_plan
    from model_converters.mapping.table import bind

    plans = export_plan(bind(family_for(hf_config).rows(hf_config), hf_config, torch.float32), layout)
    return [
        (plan.hf_name, plan.shape, piece.dim, piece.start, piece.rows, tensor.numpy().copy())
        for plan, piece, tensor in export_pieces(plans, canonical_tensors(chunks), rank)
    ]


# ---- tests ----


@pytest.fixture(scope="module")
def outcomes(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Results of every rank by case."""
    found = {}
    for num_ranks, cases in CASES.items():
        named = {name: (directories[model], sizes) for name, (model, sizes) in cases.items()}
        ranks = launch(_run_cases, num_ranks, named)
        found.update({name: [outcome[name] for outcome in ranks] for name in cases})
    return found


WITH_NETS = {name for name, (kind, _) in MODELS.items() if kind.startswith(("qwen3_next", "qwen3_5"))}
ALL_CASES = {name: model for cases in CASES.values() for name, (model, _) in cases.items()}


@pytest.mark.parametrize("case", ALL_CASES)
def test_packed_logits_in_every_layout_equal_transformers(
    case: str, outcomes: dict[str, Any], references: dict[str, Any]
) -> None:
    """Tolerance 2e-5: float32 sums of a few hundred terms in a different order. Delta nets: 2e-4, because they solve
    triangular systems."""
    tolerance = 2e-4 if ALL_CASES[case] in WITH_NETS else 2e-5
    holders = [outcome["logits"] for outcome in outcomes[case] if outcome["logits"] is not None]
    assert holders
    for logits in holders:
        for ours, theirs in zip(logits, references[ALL_CASES[case]]["logits"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", ALL_CASES)
def test_deferred_projection_gradients_equal_transformers(
    case: str, outcomes: dict[str, Any], references: dict[str, Any]
) -> None:
    """Compare every parameter, not the norm: partial gradients of hidden states that are summed twice, or not at all,
    scale some layers only. Tolerance: float32 rounding relative to the tensor's largest gradient."""
    expected = references[ALL_CASES[case]]["gradients"]
    found = policy_batch.assemble([outcome["gradients"] for outcome in outcomes[case]])
    assert set(found) == set(expected)
    for name, theirs in expected.items():
        np.testing.assert_allclose(
            found[name].numpy(), theirs, rtol=0, atol=2e-5 * np.abs(theirs).max() + 1e-8, err_msg=name
        )
