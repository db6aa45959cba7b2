"""Advantages and loss weights by data_source, compared with runs on the responses of one source."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from mcore_rl.config.algorithm import AlgorithmConfig, SourceConfig, SourceLossConfig
from mcore_rl.config.models import TeacherConfig, TeacherSourceConfig
from mcore_rl.config.schema import Config, TrainerConfig
from mcore_rl.errors import ConfigError
from mcore_rl.trainer.batches import batch_builder, response_advantages
from mcore_rl.trainer.sources import Sources, check_sources, check_teacher_sources
from mcore_rl.types import RolloutScalars
from tests.unit.rollouts import scalars_of

SOURCES = Sources.of(["code", "math", "math", "chat", "code"])
ROWS = [1, 4, 2, 3, 0]
"""Prompt row of each group: math, code, math, chat, code."""
REWARDS = np.array([1, 0, 0.5, 0, 3, 9, 2, 4, 1, 1, 0, 0.25, 7, 6, 6.5], np.float32)


@dataclass(frozen=True)
class Groups:
    scalars: tuple[RolloutScalars, ...]
    keep: tuple[np.ndarray, ...]
    chunks: tuple[object, ...] = (None,)
    greedy: tuple[RolloutScalars, ...] = ()


def five_groups(groups=range(5)):
    """Three responses to each prompt; group ids differ from prompt rows."""
    chosen = np.repeat(np.array(list(groups)), 3)
    rows = np.concatenate([np.arange(3 * g, 3 * g + 3) for g in groups])
    scalars = scalars_of(10 + chosen, 1 + rows % 4, REWARDS[rows], prompt_rows=np.array(ROWS)[chosen])
    return Groups((scalars,), (np.arange(len(chosen)),))


def advantages(groups, sources=SOURCES, **algorithm):
    rewards = groups.scalars[0].rewards
    return response_advantages(AlgorithmConfig(**algorithm), sources)(groups, rewards)


@pytest.mark.parametrize("std_level", ["group", "batch", "batch_rewards"])
def test_per_source_estimator_equals_a_run_of_each_part(std_level):
    entries = [SourceConfig("math", advantage="rloo"), SourceConfig("chat", leave_one_out=True)]
    found = advantages(five_groups(), per_source=entries, std_level=std_level)
    math = advantages(five_groups([0, 2]), None, advantage="rloo")
    chat = advantages(five_groups([3]), None, std_level=std_level, leave_one_out=True)
    code = advantages(five_groups([1, 4]), None, std_level=std_level)
    assert np.array_equal(found[[0, 1, 2, 6, 7, 8]], math)
    assert np.array_equal(found[9:12], chat)
    assert np.array_equal(found[[3, 4, 5, 12, 13, 14]], code)


def test_per_source_weight_alone_does_not_change_advantages():
    plain = advantages(five_groups(), None, std_level="batch")
    weighed = advantages(five_groups(), per_source=[SourceConfig("math", weight=3)], std_level="batch")
    assert np.array_equal(plain, weighed)


def test_source_baseline_is_the_mean_over_the_responses_of_a_source():
    found = advantages(five_groups(), baseline="source", normalize_by_std=False)
    for groups in ([0, 2], [1, 4], [3]):
        rows = np.concatenate([np.arange(3 * g, 3 * g + 3) for g in groups])
        assert found[rows].tolist() == pytest.approx((REWARDS[rows] - REWARDS[rows].mean()).tolist(), abs=1e-6)


def test_batch_builder_multiplies_loss_weights_of_a_source():
    algorithm = AlgorithmConfig(per_source=[SourceConfig("math", weight=3), SourceConfig("chat", weight=0)])
    trainer = TrainerConfig(prompts_per_step=5, prompts_per_update=5)
    plain = batch_builder(Config(trainer=trainer), 1)(five_groups(), 1, 0).loss_weights
    found = batch_builder(Config(algorithm=algorithm, trainer=trainer), 1, sources=SOURCES)(five_groups(), 1, 0)
    factors = np.repeat([3, 1, 3, 0, 1], 3)
    assert found.loss_weights.tolist() == pytest.approx((plain * factors).tolist(), rel=1e-6)


def test_batch_builder_numbers_losses_and_weighs_observations():
    math = SourceConfig("math", 0, policy_loss=SourceLossConfig(name="gspo"))
    entries = [SourceConfig("code", weight=3), SourceConfig("chat", kl_in_loss=0.1), math]
    trainer = TrainerConfig(prompts_per_step=4, prompts_per_update=2)
    groups, algorithm = five_groups(range(4)), AlgorithmConfig(per_source=entries, overlong_filtering=True)
    groups.scalars[0].clipped[:2] = 1
    batch = batch_builder(Config(algorithm=algorithm, trainer=trainer), 1, sources=SOURCES)(groups, 1, 0)
    # The groups' sources: math, code, math, chat. Two of the first update's six responses are filtered out.
    assert batch.losses.tolist() == np.repeat([2, 0, 2, 1], 3).tolist()
    assert [each.policy_loss.name for each in algorithm.loss_settings] == ["ppo_clip", "ppo_clip", "gspo"]
    # Groups with weight 0 do not count, so each of the others is alone in its update.
    expected = np.repeat([0, 3 / 3, 0, 1 / 3], 3)
    assert batch.observation_weights.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    shares = [share for part in batch.shares(1, batch.rows) for share in part.by_update()]
    for share in shares:
        assert share.losses.tolist() == batch.losses[share.samples].tolist()
        assert share.observation_weights.tolist() == batch.observation_weights[share.samples].tolist()
    assert batch_builder(Config(trainer=trainer), 1, sources=SOURCES)(groups, 1, 0).losses is None


def test_role_baseline_compares_the_responses_of_a_role_with_its_rewards():
    """Two episodes of each of two prompts: a solver and, in three of them, a critic with two sequences."""
    roles = np.array(["critic"] * 2 + ["solver"] * 3 + ["critic"] * 2 + ["solver", "critic", "solver"])
    episodes = np.array([0, 0, 0, 3, 4, 4, 4, 7, 7, 7])
    rewards = np.array([3, 3, 3, 1, 2, 2, 2, 7, 7, 7], np.float32)
    others = np.array([1, 1, 2, 0, 1, 1, 1, 4, 2, 4], np.float32)
    columns = {"episodes": episodes, "roles": roles, "other_rewards": others}
    scalars = scalars_of([5, 5, 5, 5, 9, 9, 9, 9, 9, 9], 4, rewards, **columns)
    groups = Groups((scalars,), (np.arange(10),))
    found = advantages(groups, None, baseline="role", normalize_by_std=False)
    # Prompt 5: the critic alone has 2; solvers have 1 and 1. Prompt 9: critics have 1 and 5, solvers 1 and 3.
    assert found.tolist() == [0, 0, 0, 0, -1, -2, -2, 1, 2, 1]
    plain = replace(scalars, roles=None, other_rewards=None)
    alone = advantages(Groups((plain,), (np.arange(10),)), None, baseline="role", normalize_by_std=False)
    assert alone.tolist() == [1, 1, 1, -1, -2.5, -2.5, -2.5, 2.5, 2.5, 2.5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"per_source": [SourceConfig("maths")]},
            "maths: data.train has no row with this data_source; it has: code, ma",
        ),
        ({"per_source": [SourceConfig("math", advantage="gae")]}, "math: .* algorithm.advantage=gae needs more"),
        ({"per_source": [SourceConfig("math", advantage="remax")]}, "algorithm.advantage=remax needs more"),
        ({"advantage": "gae", "per_source": [SourceConfig("math", advantage="rloo")]}, "advantage=gae needs more"),
        (
            {"per_source": [SourceConfig("math", advantage="rloo", std_level="batch")]},
            "std_level: not an option of .*rloo",
        ),
        (
            {"per_source": [SourceConfig(name, weight=0) for name in ("code", "math", "chat")]},
            "algorithm.per_source: weight is 0 for every data_source of data.train",
        ),
        ({"advantage": "gae", "baseline": "source"}, "baseline=source: algorithm.advantage=gae does not compare"),
        ({"advantage": "gae", "baseline": "role"}, "baseline=role: algorithm.advantage=gae does not compare"),
        ({"advantage": "optimal_token_baseline", "baseline": "source"}, "does not compare the responses"),
    ],
)
def test_check_sources_names_the_source_or_estimator(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_sources(AlgorithmConfig(**settings), SOURCES)


def test_per_source_weight_is_allowed_with_any_estimator():
    check_sources(AlgorithmConfig(advantage="gae", per_source=[SourceConfig("math", weight=2)]), SOURCES)
    check_sources(AlgorithmConfig(per_source=[SourceConfig("math", weight=0)]), SOURCES)  # the others have weight 1
    with pytest.raises(ConfigError, match=r"algorithm\.per_source names math twice"):
        AlgorithmConfig(per_source=[SourceConfig("math"), SourceConfig("math", weight=2)])


@pytest.mark.parametrize(
    ("others", "named", "expected"),
    [
        (None, ["chat", "math"], [1, -1, 1, 0, -1]),
        ("/others", ["chat", "math"], [2, 0, 2, 1, 0]),
    ],
)
def test_batch_builder_numbers_the_teacher_of_each_response(others, named, expected):
    entries = [TeacherSourceConfig(name, f"/{name}") for name in named]
    teacher = TeacherConfig(hf_path=others, by_source=entries, in_advantage=1.0)
    config = Config(trainer=TrainerConfig(prompts_per_step=5, prompts_per_update=5), teacher=teacher)
    batch = batch_builder(config, 1, sources=SOURCES)(five_groups(), 1, 0)
    # The groups' sources: math, code, math, chat, code.
    assert batch.teachers.tolist() == np.repeat(expected, 3).tolist()
    teacher.by_source = []
    assert batch_builder(config, 1, sources=SOURCES)(five_groups(), 1, 0).teachers is None


def test_check_teacher_sources_names_an_unknown_source():
    teacher = TeacherConfig(by_source=[TeacherSourceConfig("math", "/a"), TeacherSourceConfig("maths", "/b")])
    check_teacher_sources(teacher, None)
    with pytest.raises(
        ConfigError, match=r"^teacher\.by_source, maths: data\.train has no row .*it has: code, math, c"
    ):
        check_teacher_sources(teacher, SOURCES)


def test_length_penalty_of_a_role_counts_its_own_tokens():
    """Two episodes of a prompt: solver and critic have 4 and 6 tokens, then 2 and 3 + 7; the first one is right."""
    roles, episodes = np.array(["solver", "critic", "solver", "critic", "critic"]), np.array([0, 0, 2, 2, 2])
    columns = {"accuracies": np.array([1, 1, 0, 0, 0], np.float32), "other_rewards": np.zeros(5, np.float32)}
    scalars = scalars_of([5] * 5, [4, 6, 2, 3, 7], 1.0, episodes=episodes, roles=roles, **columns)
    groups = Groups((scalars,), (np.arange(5),))
    algorithm = AlgorithmConfig(baseline="role", normalize_by_std=False, length_penalty=0.1)
    settings = Config(algorithm=algorithm, trainer=TrainerConfig(prompts_per_step=1, prompts_per_update=1))
    batch = batch_builder(settings, 1)(groups, 1, 0)
    # Half of the episodes are right: 0.05 per token.
    assert batch.rewards.tolist() == pytest.approx([1 - 0.2, 1 - 0.3, 1 - 0.1, 1 - 0.5, 1 - 0.5])
    assert batch.advantages.tolist() == pytest.approx([-0.05, 0.1, 0.05, -0.1, -0.1])
