"""Policies on transformers' own model (actor.strategy=fsdp2): packed and sharded, they have the gradients and updates
of plain transformers, which computes each sequence alone in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import (
    ONE_MICROBATCH,
    SMALL,
    accumulate,
    case_parameters,
    check_gradients,
    launch_cases,
)
from tests.distributed.launch import launch
from tests.distributed.syncing import synced_slices
from tests.tiny_models import GROUPS, LLAMA3, VOCABULARY, YARN, write_tiny_model

FSDP2 = {"strategy": "fsdp2"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    # A vocabulary and heads that two ranks do not divide.
    "odd": ("qwen3", {"num_key_value_heads": 1, "vocab_size": VOCABULARY + 1}),
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    # Three experts: two ranks have two and one.
    "moe": ("qwen3_moe", {"num_experts": 3, "num_local_experts": 3}),
    "mixtral": ("mixtral", {}),
    "glm": ("glm4_moe", GROUPS | {"num_nextn_predict_layers": 0}),
    "minimax": ("minimax_m2", {}),
    "ernie": ("ernie4_5_moe", {}),
    "v2": ("deepseek_v2", {}),
    "qwen2 moe": ("qwen2_moe", {"head_dim": 8}),
    "seed": ("seed_oss", {}),
    "gemma": ("gemma3_text", {}),
    "glm lite": ("glm4_moe_lite", {}),
    "v3": ("deepseek_v3", GROUPS | {"rope_parameters": YARN}),
}
CASES: dict[int, dict[str, tuple[Any, ...]]] = {
    1: {
        "one row": ("odd", ONE_MICROBATCH, {}),
        "tied": ("tied", SMALL, {}),
        "mixtral": ("mixtral", SMALL, {}),
        "glm": ("glm", SMALL, {}),
        "v2": ("v2", SMALL, {}),
        "minimax": ("minimax", SMALL, {}),
        "ernie": ("ernie", SMALL, {}),
        "qwen2 moe": ("qwen2 moe", SMALL, {}),
        "seed": ("seed", SMALL, {}),
        "gemma": ("gemma", SMALL, {}),
        "glm lite": ("glm lite", SMALL, {}),
        "v3": ("v3", SMALL, {}),
    },
    2: {
        "odd dp2": ("odd", SMALL, {}),
        "tied dp2 recomputed": ("tied", SMALL, {"recompute": "full"}),
        "llama dp2": ("llama", SMALL, {}),
        "moe dp2": ("moe", SMALL, {}),
        "v3 dp2 recomputed": ("v3", SMALL, {"recompute": "full"}),
    },
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(write_tiny_model(root / name, kind, **changes)) for name, (kind, changes) in MODELS.items()}


@pytest.fixture(scope="module")
def references(directories: dict[str, str]) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    samples = policy_batch.UPDATES[0]
    return {kind: policy_batch.reference_gradients(directory, samples) for kind, directory in directories.items()}


def _gradients(rank: int, directories: dict[str, str], cases: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for name, (kind, tokens, settings) in cases.items():
        config = policy_batch.config(directories[kind], {}, tokens)
        vars(config.actor).update(FSDP2 | settings)
        actor = policy_batch.build_actor(config)
        loss, _ = accumulate(actor)
        results[name] = loss, policy_batch.gradient_pieces(actor)
    return results


@pytest.fixture(scope="module")
def gradients(directories: dict[str, str]) -> dict[str, list[tuple[float, list[Any]]]]:
    """Loss and slices of gradients of all ranks, by case."""
    return launch_cases(_gradients, CASES, directories)


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_packed_gradients_equal_transformers_by_sequence(size: int, case: str, gradients: Any, references: Any) -> None:
    expected_loss, expected = references[CASES[size][case][0]]
    assert sum(loss for loss, _ in gradients[case]) == pytest.approx(expected_loss, rel=1e-5)
    check_gradients([pieces for _, pieces in gradients[case]], expected)


def _both_gradients(rank: int, directory: str) -> list[list[Any]]:
    found = []
    for strategy in ("megatron", "fsdp2"):
        actor = policy_batch.build_actor(policy_batch.config(directory, {"strategy": strategy}, SMALL))
        accumulate(actor)
        found.append(policy_batch.gradient_pieces(actor))
    return found


def test_padding_token_in_a_sequence_has_gradient_of_megatron(tmp_path: Path) -> None:
    """Packed rows have no padding, so the token is real, such as an end token between two turns."""
    token = int(policy_batch.sequence(policy_batch.UPDATES[0][0])[0])
    directory = write_tiny_model(tmp_path / "padded", "qwen3", pad_token_id=token)
    (pieces,) = launch(_both_gradients, 1, str(directory))
    expected = policy_batch.assemble(pieces[:1])
    assert expected["model.embed_tokens.weight"][token].abs().max() > 0
    check_gradients(pieces[1:], expected)


def _frequencies(rank: int, directory: str) -> dict[str, torch.Tensor]:
    config = policy_batch.config(directory, {"strategy": "fsdp2"}, SMALL)
    config.model.dtype = "bfloat16"
    chunk = policy_batch.build_actor(config).chunks[0]
    return {name: buffer.numpy() for name, buffer in chunk.named_buffers()}


def test_bfloat16_model_keeps_rotary_frequencies_in_float32(directories: dict[str, str]) -> None:
    """Rounded frequencies would rotate late tokens by other angles than the engine's."""
    (found,) = launch(_frequencies, 1, directories["odd"])
    expected = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(found["model.rotary_emb.inv_freq"], expected, rtol=1e-6)


def _random(rank: int, directory: str) -> list[Any]:
    config = policy_batch.config(directory, FSDP2, SMALL)
    config.model.random_init = True
    return policy_batch.hf_pieces(policy_batch.build_actor(config))


def test_random_init_of_experts_has_the_deviation_of_the_configuration(
    directories: dict[str, str], tmp_path: Path
) -> None:
    """transformers initializes stacked experts and routers; every element is on some rank. The padding token is random
    like the others, as in Megatron's model."""
    fields = json.loads(Path(directories["v3"], "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"pad_token_id": 3}))
    tensors = policy_batch.assemble(launch(_random, 2, str(tmp_path)))
    assert tensors["model.embed_tokens.weight"][3].any()
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            assert (tensor == 1).all(), name
        elif name.endswith("correction_bias"):
            assert (tensor == 0).all(), name
        else:
            assert 0.01 < tensor.std() < 0.03, name  # initializer_range is 0.02


def _sent(rank: int, directories: dict[str, str]) -> dict[str, list[tuple[str, Any, Any]]]:
    """Return the slices that this rank sends, by model: HF name, index of the first element, values."""
    from mcore_rl.weights.send import part_of

    found = {}
    for model, directory in directories.items():
        actor = policy_batch.build_actor(policy_batch.config(directory, FSDP2, SMALL))
        tensors = actor.tensors()
        found[model] = [
            (each.hf_name, each.first, part_of(each, tensors, each.shape).numpy().copy())
            for each in synced_slices(actor)
        ]
    return found


@pytest.fixture(scope="module")
def sent(directories: dict[str, str]) -> list[dict[str, list[tuple[str, Any, Any]]]]:
    return launch(_sent, 2, directories)


@pytest.mark.parametrize("model", MODELS)
def test_ranks_send_every_element_of_the_checkpoint_once(model: str, directories: dict[str, str], sent: Any) -> None:
    with safe_open(f"{directories[model]}/model.safetensors", "np") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found = {name: np.full_like(tensor, np.nan) for name, tensor in expected.items()}
    for name, first, values in (each for rank in sent for each in rank[model]):
        place = found[name][tuple(slice(start, start + n) for start, n in zip(first, values.shape, strict=True))]
        assert np.isnan(place).all(), f"{name} is sent twice"
        place[...] = values
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_ranks_send_whole_experts_that_they_store(sent: Any) -> None:
    """Two ranks divide three experts of a layer as torch.chunk does, and send other tensors by rows."""
    experts = [{name.split(".")[5] for name, _, _ in rank["moe"] if ".experts." in name} for rank in sent]
    assert experts == [{"0", "1"}, {"2"}]
