"""Teachers on real vLLM engines and servers: log-probabilities equal those of transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_tokenizer import write as write_tokenizer

from mcore_rl.config.models import TeacherConfig
from mcore_rl.config.schema import Config, RolloutConfig
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.engines.server.client import connect
from mcore_rl.errors import ConfigError
from mcore_rl.preparation.teacher import check_vocabulary
from mcore_rl.types import TokenScores, TokenSequence
from tests.contract.engines import start_engine
from tests.tiny_models import write_tiny_model
from tests.vllm_server import vllm_server

pytestmark = pytest.mark.on_demand

K = 5
LENGTH = 128
# float32 on both sides: 7e-6 measured. A wrong token, place or temperature differs by more than 0.1.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("teacher")
    write_tokenizer(directory)
    size = len(load_tokenizer(str(directory)))
    write_tiny_model(directory, "qwen3", seed=5, std=0.2, head_dim=32, vocab_size=size)
    return directory


@pytest.fixture(scope="module")
def sequences(model: Path) -> list[TokenSequence]:
    """Sequences of several lengths; the longest is computed in two pieces."""
    generator, size = np.random.default_rng(0), len(load_tokenizer(str(model)))
    return [
        TokenSequence(generator.integers(0, size, length).astype(np.int32), start)
        for length, start in ((40, 3), (9, 1), (40, 39), (100, 50), (2, 1))
    ]


@pytest.fixture(scope="module")
def expected(model: Path, sequences: list[TokenSequence]) -> list[TokenScores]:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    scores = []
    for sequence in sequences:
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        with torch.no_grad():
            log_p = theirs(ids[None]).logits[0, sequence.start - 1 : -1].double().log_softmax(-1)
        best = log_p.topk(K)
        logp = log_p.gather(1, ids[sequence.start :, None])[:, 0]
        scores.append(TokenScores.of(logp.numpy(), best.indices.numpy(), best.values.numpy()))
    return scores


def assert_equal(found: list[TokenScores], expected: list[TokenScores], *, k: int) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours.logp - theirs.logp).max() < TOLERANCE
        if k:
            assert np.array_equal(ours.top_ids, theirs.top_ids)  # type: ignore[arg-type]
            assert np.abs(ours.top_logp - theirs.top_logp).max() < TOLERANCE  # type: ignore[operator]


def test_scores_of_an_engine_equal_transformers(
    model: Path, sequences: list[TokenSequence], expected: list[TokenScores]
) -> None:
    engine = start_engine("vllm", model, max_batched_tokens=64, max_prompt_tokens=64, max_response_tokens=64)
    try:
        for _ in range(2):  # the second time also finds the first one's prefixes in the cache
            assert_equal(engine.call("score", sequences, K), expected, k=K)
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with vllm_server(model, LENGTH, "a secret") as address:
        yield address


def section(url: str, **keys: Any) -> TeacherConfig:
    return TeacherConfig(url=url, in_advantage=1.0, **keys)


@pytest.mark.parametrize(("api", "k"), [("vllm", K), ("vllm", 0), ("completions", 0)])
def test_scores_of_a_vllm_server_equal_transformers(
    url: str, api: str, k: int, sequences: list[TokenSequence], expected: list[TokenScores]
) -> None:
    config = section(url, api=api)
    assert_equal(connect(config, config.entries[0], "a secret").score(sequences, k), expected, k=k)


@pytest.mark.parametrize("api", ["vllm", "completions"])
def test_check_vocabulary_of_a_vllm_server(
    url: str, api: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "a secret")
    config, tokenizer = Config(), load_tokenizer(str(model))
    config.teacher = section(url, api=api, api_key_variable="TEACHER_KEY")
    config.rollout = RolloutConfig(max_prompt_tokens=64, max_response_tokens=63)
    check_vocabulary(config, tokenizer)
    longer = replace(config, rollout=RolloutConfig(max_prompt_tokens=64, max_response_tokens=64))
    with pytest.raises(ConfigError, match=r"up to 128 tokens, and .* = 129"):
        check_vocabulary(longer, tokenizer)
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["other"] = vocabulary.pop(tokenizer.decode([5]))  # the second token that is sent
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"another vocabulary than the policy: token \d+ is"):
        check_vocabulary(config, load_tokenizer(str(tmp_path)))
