"""Check of a few tokens before training: the batch that the ranks receive, and the error for a difference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_rl.config import Config, load_config
from mcore_rl.config.schema import resolved_dtype
from mcore_rl.data.packing import SequenceCost
from mcore_rl.errors import ConfigError
from mcore_rl.model_check import model_check
from mcore_rl.types import Batch, Max, Mean, Metric, TrajectoryBuffers
from tests.tiny_models import reference_logits, write_tiny_model

NUM_DP_RANKS = 3


class Ranks:
    """Fake ranks that report a given difference in nats."""

    def __init__(self, difference: float) -> None:
        self.difference, self.batch = difference, None

    def store(self, buffers: TrajectoryBuffers) -> TrajectoryBuffers:
        return buffers

    def compare(self, batch: Batch) -> dict[str, Metric]:
        self.batch = batch
        return {"rollout/logp_diff_mean": Mean(self.difference, 1), "rollout/logp_diff_max": Max(2 * self.difference)}


def configured(hf: Path, *overrides: str) -> Config:
    base = hf / "run.yaml"
    base.write_text(f"model:\n  hf_path: {hf}\ndata:\n  train: none.jsonl\nrun:\n  dir: {hf}\n")
    config = load_config(base, list(overrides))
    config.model.dtype = resolved_dtype(config.model.dtype, cuda=False)
    return config


def checked(config: Config, ranks: Ranks) -> None:
    with model_check(config.model, config.actor, NUM_DP_RANKS, SequenceCost()) as check:
        check(ranks)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)


def test_every_rank_gets_the_log_probabilities_of_transformers(hf: Path) -> None:
    ranks = Ranks(0.0)
    checked(configured(hf), ranks)
    (buffers,) = ranks.batch.chunks
    assert {int(rank) for rank in ranks.batch.dp_ranks} == set(range(NUM_DP_RANKS))
    sequences = np.split(buffers.tokens, buffers.token_offsets[1:-1])
    given = np.split(buffers.logp_rollout, buffers.response_offsets[1:-1])
    for tokens, logp in zip(sequences, given, strict=True):
        (logits,) = reference_logits(hf, [tokens.tolist()])
        wanted = logits[:-1].log_softmax(-1).gather(1, torch.from_numpy(tokens[1:, None]).long())[:, 0]
        torch.testing.assert_close(torch.from_numpy(logp), wanted)


@pytest.mark.parametrize(("dtype", "within", "beyond"), [("float32", 5e-4, 2e-3), ("bfloat16", 0.05, 0.3)])
def test_a_difference_beyond_rounding_stops_the_run(dtype: str, within: float, beyond: float, hf: Path) -> None:
    config = configured(hf, f"model.dtype={dtype}")
    checked(config, Ranks(within))
    for difference in (beyond, float("nan")):
        with pytest.raises(
            ConfigError, match=rf"^model\.hf_path={hf}: .* differ from transformers by {difference:.3g} nats on"
        ):
            checked(config, Ranks(difference))


@pytest.mark.parametrize("override", ["model.check_logits=never", "model.random_init=true", "actor.fp8=blockwise"])
def test_what_has_nothing_to_compare_with_is_let_through(override: str, hf: Path) -> None:
    ranks = Ranks(9.0)
    checked(configured(hf, override), ranks)
    assert ranks.batch is None


def test_always_is_refused_where_there_is_nothing_to_compare_with(hf: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.check_logits=always, but model\.random_init=true"):
        checked(configured(hf, "model.check_logits=always", "model.random_init=true"), Ranks(0.0))


def test_what_transformers_cannot_load_is_said_with_the_way_around(tmp_path: Path, hf: Path) -> None:
    spoilt = write_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)
    config = (spoilt / "config.json").read_text()
    (spoilt / "config.json").write_text(config.replace('"use_cache": true', '"use_cache": "often"'))
    with pytest.raises(ConfigError, match=r"^model\.hf_path: transformers cannot load .*model\.check_logits=never"):
        checked(configured(spoilt), Ranks(0.0))
