"""The reward model: scores equal the logits of transformers' sequence classification, in every layout and division into
micro-batches; a checkpoint without a head is rejected.

One launch per number of ranks runs all its cases.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.errors import ConfigError
from tests.distributed import policy_batch
from tests.distributed.gradient_oracle import ONE_MICROBATCH, SMALL, case_parameters, launch_cases
from tests.distributed.launch import launch
from tests.tiny_models import VOCABULARY, write_tiny_classifier, write_tiny_model

# Float32 against float64, in a different order for each layout. The value of a neighboring token differs by 1e-1.
TOLERANCE = 1e-5  # scores are of size 1
BFLOAT16_TOLERANCE = 0.1  # 8 bits of four layers
PADDING = 7
Case = tuple[str, dict[str, Any], int, dict[str, Any]]
OFFLOADED = {"offload": True}
CASES: dict[int, dict[str, Case]] = {
    1: {
        "dense": ("dense", {}, ONE_MICROBATCH, {}),
        "dense cut": ("dense", {}, SMALL, OFFLOADED),
        "moe": ("moe", {}, ONE_MICROBATCH, {}),
        "padded": ("padded", {}, SMALL, {}),
        "bfloat16": ("dense", {}, SMALL, {"dtype": "bfloat16", "offload": True}),
    },
    2: {
        "dense sharded": ("dense", {"shard_parameters": True}, SMALL, OFFLOADED),
        "dense fsdp2": ("dense", {"strategy": "fsdp2"}, SMALL, OFFLOADED),
        "dense tp2": ("dense", {"tp": 2}, SMALL, {}),
        "dense tp2 without sp": ("dense", {"tp": 2, "sequence_parallel": False}, SMALL, {}),
        "dense pp2": ("dense", {"pp": 2}, SMALL, OFFLOADED),
        "dense cp2": ("dense", {"cp": 2}, SMALL, {}),
        "padded cp2": ("padded", {"cp": 2}, ONE_MICROBATCH, {}),
        "moe dp2 ep2": ("moe", {"ep": 2}, SMALL, OFFLOADED),
        "moe tp2": ("moe", {"tp": 2}, SMALL, {}),
        "moe pp2": ("moe", {"pp": 2}, SMALL, {}),
    },
}
LENGTHS = [1, 2, 17, 9, 24, 1, 13, 5, 8, 3]
ALL_PADDING = 5


def sequence(number: int) -> np.ndarray:
    """Token sequences: some end in padding tokens, one consists of them, and some have padding tokens in between."""
    tokens = np.random.default_rng(700 + number).integers(0, VOCABULARY, LENGTHS[number]).astype(np.int32)
    if number % 3 == 0:
        tokens[-2:] = PADDING
    if number == ALL_PADDING:
        tokens[:] = PADDING
    tokens[1 : len(tokens) - 3 : 5] = PADDING
    return tokens


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("reward_models")
    write_tiny_classifier(root / "dense", "qwen3")
    write_tiny_classifier(root / "moe", "qwen3_moe")
    write_tiny_classifier(root / "padded", "llama", pad_token_id=PADDING)
    write_tiny_model(root / "causal", "qwen3")
    return {path.name: str(path) for path in root.iterdir()}


@pytest.fixture(scope="module")
def expected(directories: dict[str, str]) -> dict[str, list[float]]:
    """Logits of transformers in float64, one unpacked sequence at a time."""
    from transformers import AutoModelForSequenceClassification

    found = {}
    for name in ("dense", "moe", "padded"):
        loops = {"attn_implementation": "eager", "experts_implementation": "eager", "local_files_only": True}
        model = AutoModelForSequenceClassification.from_pretrained(directories[name], **loops).double().eval()
        assert (model.config.pad_token_id == PADDING) == (name == "padded")
        with torch.no_grad():
            sequences = [torch.from_numpy(sequence(number).astype(np.int64)) for number in range(len(LENGTHS))]
            found[name] = [float(model(tokens[None]).logits[0, 0]) for tokens in sequences]
    return found


def _reward_model(rank: int, directory: str, parallel: dict[str, Any], tokens: int, options: dict[str, Any]) -> Any:
    import torch.distributed as dist

    from mcore_rl.megatron.roles.reward_model import MegatronRewardModel

    config = policy_batch.config("nowhere", {"tp": 64}, 1)  # the reward model reads no setting of the actor
    config.model.random_init = True  # it is not random even if the policy is
    config.model.dtype = options.get("dtype", "float32")
    section = config.reward_model
    section.hf_path, section.tokens_per_microbatch = directory, tokens
    policy_batch.set_layout(section, parallel)
    section.offload.params = options.get("offload", False)
    return MegatronRewardModel(config, rank, dist.get_world_size(), None)


def _measure(rank: int, directories: dict[str, str], cases: dict[str, Case]) -> dict[str, Any]:
    return {name: _measure_one(rank, directories[case[0]], case) for name, case in cases.items()}


def _measure_one(rank: int, directory: str, case: Case) -> dict[str, Any]:
    _, parallel, tokens, options = case
    model = _reward_model(rank, directory, parallel, tokens, options)
    place, layout = model.layout.coordinates(rank), model.layout
    # Uneven: the first of two data-parallel ranks has three sequences, so that it needs dummy micro-batches.
    mine = [n for n in range(len(LENGTHS)) if min(int(n > 2), layout.dp - 1) == place.dp]
    found = {
        "away before": model.memory.released_bytes,
        "scores": model.score({number: sequence(number) for number in mine}),
        "away after": model.memory.released_bytes,
        # One sequence in total: the other ranks have none.
        "again": model.score({4: sequence(4)} if place.dp == layout.dp - 1 else {}),
        "on last stage": place.pp == layout.pp - 1,
        "mine": mine,
    }
    model.memory.load("params")
    assert not any(parameter.requires_grad for chunk in model.chunks for parameter in chunk.parameters())
    return found


@pytest.fixture(scope="module")
def results(directories: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Results of all ranks by case."""
    return launch_cases(_measure, CASES, directories)


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_reward_model_scores_equal_transformers_logits(size: int, case: str, results: Any, expected: Any) -> None:
    model, _, _, options = CASES[size][case]
    tolerance = BFLOAT16_TOLERANCE if "dtype" in options else TOLERANCE
    seen: set[int] = set()
    for rank in results[case]:
        assert sorted(rank["scores"]) == (rank["mine"] if rank["on last stage"] else [])
        for number, score in rank["scores"].items():
            assert abs(score - expected[model][number]) <= tolerance, f"sequence {number} of {LENGTHS[number]} tokens"
        seen |= rank["scores"].keys()
    assert seen == set(range(len(LENGTHS)))


@pytest.mark.parametrize(("size", "case"), case_parameters(CASES))
def test_reward_model_weights_are_offloaded_between_passes(size: int, case: str, results: Any, expected: Any) -> None:
    model, _, _, options = CASES[size][case]
    for rank in results[case]:
        assert (rank["away before"] > 0) == (rank["away after"] > 0) == bool(options.get("offload"))
    again = {number: score for rank in results[case] for number, score in rank["again"].items()}
    assert again.keys() == {4}
    tolerance = BFLOAT16_TOLERANCE if "dtype" in options else TOLERANCE
    assert abs(again[4] - expected[model][4]) <= tolerance


def _build_causal(rank: int, directory: str) -> str:
    try:
        _reward_model(rank, directory, {}, SMALL, {})
    except ConfigError as error:
        return str(error)
    return ""


def test_reward_model_from_causal_model_raises(directories: dict[str, str]) -> None:
    (message,) = launch(_build_causal, 1, directories["causal"])
    assert message.startswith(f"reward_model.hf_path={directories['causal']}: score.weight is missing")
