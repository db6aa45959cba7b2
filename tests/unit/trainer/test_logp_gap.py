"""Comparison of engines and trainer before the first step; engines and actor are fakes of their Protocols."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from mcore_rl.trainer.logp_gap import LogpGapCheck, logp_gap_limit, probable_causes
from mcore_rl.trainer.loop import train
from mcore_rl.types import Batch, BuffersRef, LogpGap, RolloutResult
from tests.unit.rollouts import scalars_of
from tests.unit.trainer.test_loop import Recorder, make


def gap(*differences: float, own_routing: bool = False) -> LogpGap:
    return LogpGap.between(differences, own_routing=own_routing)


@dataclass
class Engines:
    names: tuple[str, ...]
    asked: list[int] = field(default_factory=list)

    def probe(self, num_prompts: int) -> dict[str, RolloutResult]:
        self.asked.append(num_prompts)
        return {
            name: (BuffersRef(name), scalars_of(np.arange(num_prompts) + number * num_prompts))
            for number, name in enumerate(self.names)
        }


@dataclass
class Actor:
    gaps: list[LogpGap]
    batches: list[Batch] = field(default_factory=list)

    def compare_logp(self, batch: Batch) -> list[LogpGap]:
        self.batches.append(batch)
        return self.gaps


def settled(**rollout: object) -> Config:
    config = Config()
    config.model.dtype, config.model.hf_path = "float32", "/model"
    for name, value in rollout.items():
        setattr(config.rollout, name, value)
    return config


def checked(config: Config, *gaps: LogpGap, num_dp_ranks: int = 1) -> tuple[list[str], Actor, Engines]:
    lines: list[str] = []
    engines = Engines(tuple(f"rollout engine {number}" for number in range(len(gaps))))
    actor = Actor(list(gaps))
    LogpGapCheck(config, cast(Any, actor), engines.probe, num_dp_ranks, lines.append).check(3)
    return lines, actor, engines


def test_check_equal_engines_logs_gap_and_limit() -> None:
    [line], _, _ = checked(settled(), gap(1e-6, 3e-6), gap(0.0))
    assert line == (
        "log-probabilities of 2 rollout engines and trainer differ by 2e-06 nats on average (largest 3e-06, 2 tokens); "
        "the limit is 0.001"
    )


def test_check_one_bad_engine_is_named_with_limit_and_key() -> None:
    with pytest.raises(ConfigError) as raised:
        checked(settled(), gap(1e-6), gap(2.0, 4.0), gap(1e-7))
    message = str(raised.value)
    assert message.startswith("log-probabilities of rollout engine 1 and the trainer differ by 3 nats on average")
    key = "rollout.max_logp_gap"
    for part in (f"{key} is 0.001", "training has not started", "config.json", f"{key}=null"):
        assert part in message
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("own_routing", [False, True])
def test_check_value_not_finite_stops(bad: float, own_routing: bool) -> None:
    with pytest.raises(ConfigError, match="rollout engine 1"):
        checked(settled(), gap(1e-6), gap(bad, 0.0, 0.0, own_routing=own_routing))


def test_check_own_routing_compares_the_median() -> None:
    few_tokens_moved = (1e-6,) * 9 + (0.5,)
    checked(settled(), gap(*few_tokens_moved, own_routing=True))
    with pytest.raises(ConfigError, match="on average"):
        checked(settled(), gap(*few_tokens_moved))
    with pytest.raises(ConfigError, match=r"in the median.*router_replay=engine"):
        checked(settled(), gap(*(0.3,) * 9, 1e-6, own_routing=True))


@pytest.mark.parametrize(
    ("dtype", "fp8", "quantization", "limit", "wanted"),
    [
        ("float32", "none", "none", "auto", 1e-3),
        ("bfloat16", "none", "none", "auto", 0.05),
        ("float16", "none", "none", "auto", 0.01),
        ("bfloat16", "blockwise", "none", "auto", 0.2),
        ("bfloat16", "none", "fp8", "auto", 0.2),
        ("bfloat16", "none", "int4", "auto", 0.5),
        ("bfloat16", "none", "fp8", 1, 1.0),
        ("float32", "none", "none", None, None),
    ],
)
def test_logp_gap_limit_depends_on_rounding_unless_set(
    dtype: str, fp8: str, quantization: str, limit: object, wanted: float | None
) -> None:
    config = settled(max_logp_gap=limit)
    config.model.dtype, config.actor.fp8, config.rollout.quantization = dtype, fp8, quantization
    assert logp_gap_limit(config) == wanted


def test_logp_gap_limit_with_rounded_training_is_that_of_bfloat16() -> None:
    config = settled(max_logp_gap="auto")
    config.model.dtype, config.rollout.quantization, config.actor.quantization_aware = "bfloat16", "int4", 128
    assert logp_gap_limit(config) == 0.05


def test_check_null_generates_nothing() -> None:
    lines, actor, engines = checked(settled(max_logp_gap=None), gap(9.0))
    assert (lines, actor.batches, engines.asked) == ([], [], [])


@pytest.mark.parametrize("num_dp_ranks", [1, 3, 6])
def test_check_batch_has_one_update_per_engine(num_dp_ranks: int) -> None:
    _, actor, engines = checked(settled(), gap(0.0), gap(0.0), num_dp_ranks=num_dp_ranks)
    [batch], [num_prompts] = actor.batches, engines.asked
    assert batch.version == 3
    assert [batch.chunk_ids[update].tolist() for update in batch.updates] == [[0] * num_prompts, [1] * num_prompts]
    for update in batch.updates:
        assert set(batch.dp_ranks[update]) == set(range(num_dp_ranks))


def test_probable_causes_depend_on_the_configuration() -> None:
    config = settled(temperature=0.7)
    config.weights.verify_every = 1
    with pytest.raises(ConfigError) as raised:
        checked(config, gap(1.0))
    message = str(raised.value)
    assert "model.dtype=float32" in message
    # Temperatures are exact per token, and truncated sampling is rejected.
    for absent in ("verify_every", "fp8", "router_replay", "adapters", "temperature", "top_p", "float32_head"):
        assert absent not in message
    config = settled()
    config.actor.lora.rank, config.actor.fp8, config.model.dtype = 8, "blockwise", "bfloat16"
    with pytest.raises(ConfigError) as raised:
        checked(config, gap(1.0))
    for present in ("verify_every=1", "actor.fp8=blockwise", "adapters", "model.float32_head=true"):
        assert present in str(raised.value)
    assert "float32_router" not in str(raised.value)
    routed = probable_causes(config, gap(1.0, own_routing=True))
    assert [cause for cause in routed if "model.float32_router=true" in cause]
    config.model.float32_head = config.model.float32_router = True
    assert not [cause for cause in probable_causes(config, gap(1.0, own_routing=True)) if "float32_" in cause]


def test_logp_gap_sum_of_parts_equals_the_whole() -> None:
    values = [0.1, 0.5, 0.2, 0.9, 0.4]
    whole, parts = gap(*values), gap(*values[:2]) + gap() + gap(*values[2:])
    assert (parts.mean.value, parts.median, parts.largest) == pytest.approx((0.42, whole.median, whole.largest))
    assert (parts.num_tokens, parts.median.value) == (5, 0.4)


def test_train_checks_gap_at_start_and_resume(tmp_path: Path) -> None:
    for steps, calls in (
        (2, ["publish 0", "check 0", "validate 0"]),
        (4, ["publish 2", "check 2", "collect 3"]),
        (4, []),
    ):
        part = Recorder()
        run = make(tmp_path, steps, part)
        run.logp_gap = SimpleNamespace(check=lambda version, part=part: part.note(f"check {version}"))
        train(run)
        places = [place for place, call in enumerate(part.calls) if call.startswith("check")]
        assert [part.calls[place - 1 : place + 2] for place in places] == ([calls] if calls else [])  # no step is left
