"""Per-token values that a trainer rank writes for the report."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_rl.config.schema import Config
from mcore_rl.megatron.model.attention.context import SINGLE_RANK
from mcore_rl.megatron.step.microbatches import Packing, build_microbatches
from mcore_rl.megatron.step.token_values import TokenValueWriter
from tests.distributed import policy_batch

SHARE = policy_batch.share(list(range(len(policy_batch.PROMPTS))), 0, 1)


def logp_policy() -> dict[int, torch.Tensor]:
    counts = [int(policy_batch.trained(sample).sum()) for sample in SHARE.samples.tolist()]
    return {
        sample: torch.from_numpy(np.random.default_rng(sample).normal(-3, 1, count).astype(np.float32))
        for sample, count in enumerate(counts)
    }


def written(directory: Path, num_responses: int, tokens_per_microbatch: int = 20) -> list[dict[str, list[float]]]:
    chunks = policy_batch.chunks()
    microbatches = build_microbatches(SHARE, chunks, Packing(tokens=tokens_per_microbatch))
    TokenValueWriter(directory, num_responses, SINGLE_RANK).write(SHARE, chunks, microbatches, logp_policy())
    path = directory / f"step_{policy_batch.VERSION + 1}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("tokens_per_microbatch", [20, 10_000])
def test_token_values_belong_to_the_response_of_the_digest(tmp_path: Path, tokens_per_microbatch: int) -> None:
    samples = {zlib.crc32(policy_batch.sequence(int(sample)).tobytes()): int(sample) for sample in SHARE.samples}
    records = written(tmp_path, 100, tokens_per_microbatch)
    assert len(records) == len(samples)
    for record in records:
        sample = samples.pop(int(record["digest"]))  # type: ignore[call-overload]
        trained = policy_batch.trained(sample) != 0
        assert record["token_ids"] == policy_batch.sequence(sample)[policy_batch.PROMPTS[sample] :].tolist()
        assert record["logp_rollout"] == pytest.approx(policy_batch.logp_rollout(sample)[trained], abs=1e-5)
        assert record["logp_policy"] == pytest.approx(logp_policy()[sample].numpy(), abs=1e-5)


def test_token_values_number_of_responses_is_bounded(tmp_path: Path) -> None:
    assert len(written(tmp_path, 3)) == 3


def test_token_values_long_response_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_rl.megatron.step.token_values.MAX_TOKENS", 5)
    # Token 3 of each response is not trained.
    longest = max(written(tmp_path, 100), key=lambda record: len(record["logp_policy"]))
    assert (len(longest["token_ids"]), len(longest["logp_rollout"]), len(longest["logp_policy"])) == (5, 4, 4)


def test_token_values_of_zero_responses_need_no_writer() -> None:
    config = Config()
    config.observe.token_responses = 0
    assert TokenValueWriter.from_config(config, SINGLE_RANK) is None


def test_token_values_unwritable_directory_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chunks = policy_batch.chunks()
    microbatches = build_microbatches(SHARE, chunks, Packing(tokens=20))
    TokenValueWriter(tmp_path / "no" / "where", 2, SINGLE_RANK).write(SHARE, chunks, microbatches, logp_policy())
    assert "cannot be written" in caplog.text
