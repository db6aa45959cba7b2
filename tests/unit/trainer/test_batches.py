"""Advantages of a training batch, computed from the scalars on the driver."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from mcore_rl import types
from mcore_rl.algorithms import advantage_options, compute_advantages, estimator
from mcore_rl.algorithms.advantages.per_token import GAE
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.reward import TAKEN
from mcore_rl.config.schema import Config, TrainerConfig
from mcore_rl.data.batching import one_row_per_episode, positions_in_groups
from mcore_rl.data.packing import TOKENS
from mcore_rl.errors import ConfigError, NonFiniteError
from mcore_rl.trainer.batches import batch_builder, describe, recorded_batches
from mcore_rl.types import RolloutScalars
from tests.unit.rollouts import scalars_of


@dataclass(frozen=True)
class Groups:
    """Responses of one rollout call, all kept."""

    scalars: tuple[RolloutScalars, ...]
    keep: tuple[np.ndarray, ...]
    chunks: tuple[object, ...] = (None,)
    greedy: tuple[RolloutScalars, ...] = ()


def one_group(rewards, trained_tokens):
    scalars = scalars_of([0] * len(rewards), trained_tokens, rewards)
    return Groups((scalars,), (np.arange(len(rewards)),))


def config(advantage):
    return Config(
        algorithm=AlgorithmConfig(advantage=advantage),
        trainer=TrainerConfig(prompts_per_step=1, prompts_per_update=1),
    )


def test_batch_builder_weighs_by_trained_tokens():
    groups = one_group([1.0, 0.0], [3, 1])
    assert batch_builder(config("opo"), 1)(groups, 1, 0).advantages.tolist() == [0.25, -0.75]
    # Centered rewards per token: three times 0.5 and once -0.5, so the mean is 0.25 and the sample variance 0.25.
    whitened = batch_builder(config("reinforce_plus_plus_baseline"), 1)(groups, 1, 0).advantages
    assert whitened.tolist() == pytest.approx([0.5, -1.5], rel=1e-6)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
def test_batch_builder_per_token_estimator_sets_zero_advantages(name):
    batch = batch_builder(config(name), 1)(one_group([1.0, 0.0], [3, 1]), 1, 0)
    assert batch.advantages.tolist() == [0, 0]
    assert batch.rewards.tolist() == [1, 0]


def test_greedy_rewards_match_the_group():
    first, second = one_group([1.0, 0.0], [3, 1]).scalars[0], one_group([0.5, 0.25], [2, 2]).scalars[0]
    scalars = (replace(first, group_ids=np.array([9, 9])), replace(second, group_ids=np.array([4, 4])))
    greedy = replace(first, group_ids=np.array([4, 9]), rewards=np.array([0.25, 0.75], np.float32))
    groups = Groups(scalars, (np.arange(2), np.arange(2)), (None, None), (greedy,))
    settings = replace(config("remax"), trainer=TrainerConfig(prompts_per_step=2, prompts_per_update=2))
    assert batch_builder(settings, 1)(groups, 1, 0).advantages.tolist() == [0.25, -0.75, 0.25, 0]


def test_score_parts_cannot_have_names_of_metrics():
    groups = replace(one_group([1.0, 0.0], [3, 1]), greedy=one_group([1.0], [3]).scalars)
    found = describe(types.Groups((None,), groups.scalars, groups.keep, groups.greedy))
    ours = {name.removeprefix("reward/") for name in found if name.startswith("reward/")}
    assert ours
    assert ours <= TAKEN


def test_check_rewards_not_finite_names_responses():
    with pytest.raises(NonFiniteError, match=r"sample 1 \(group 0\): nan"):
        batch_builder(config("grpo"), 1)(one_group([1.0, float("nan")], [3, 1]), 1, 0)


def test_batch_builder_unsupported_options_are_rejected():
    algorithm = AlgorithmConfig(advantage="gae", gamma=0.9, lam=0.8, whiten=False)
    assert estimator("gae", **advantage_options(algorithm)) == GAE(gamma=0.9, lam=0.8, whiten=False)
    assert estimator("gae", **advantage_options(AlgorithmConfig(advantage="gae"))) == GAE()
    with pytest.raises(ConfigError, match=r"algorithm\.gamma, algorithm\.lam, algorithm\.whiten: not an option of"):
        batch_builder(Config(algorithm=replace(algorithm, advantage="grpo")), 1)


def test_batch_builder_kwargs_need_a_user_function(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def scaled(token_rewards, mask, group_ids, values, baseline_rewards, *, gamma=1.0, scale, centre=True):\n"
        "    return gamma * scale * token_rewards + centre\n"
    )
    name = f"{tmp_path / 'mine.py'}:scaled"
    algorithm = AlgorithmConfig(advantage=name, gamma=0.5, advantage_kwargs={"scale": 4, "centre": None})
    inputs = {
        "token_rewards": torch.tensor([[1.0], [3.0]]),
        "mask": torch.ones(2, 1),
        "group_ids": torch.zeros(2).long(),
    }
    found = compute_advantages(name, **inputs, **advantage_options(algorithm))
    assert found.advantages.tolist() == [[3.0], [7.0]]
    with pytest.raises(ConfigError, match=r"mine\.py:scaled cannot be called .*scal"):
        batch_builder(Config(algorithm=replace(algorithm, advantage_kwargs={"scal": 4})), 1)
    with pytest.raises(ConfigError, match=r"algorithm\.advantage_kwargs: algorithm\.gamma has its own key"):
        batch_builder(Config(algorithm=replace(algorithm, advantage_kwargs={"scale": 4, "gamma": 0.1})), 1)
    with pytest.raises(ConfigError, match=r"algorithm\.advantage_kwargs=.*'scale': 4.*advantage=grpo is built in"):
        batch_builder(Config(algorithm=AlgorithmConfig(advantage_kwargs={"scale": 4})), 1)


def test_batch_builder_filtered_responses_have_zero_weight(tmp_path):
    (tmp_path / "keep.py").write_text(
        "def short(*, rewards, accuracies, group_ids, lengths, clipped):\n    return lengths < 5\n"
    )
    groups = one_group([1.0, 0.0, 0.5], [3, 1, 9])
    clipped = replace(groups.scalars[0], clipped=np.array([0, 1, 0], np.uint8))
    groups = replace(groups, scalars=(clipped,))

    def weights(**changes):
        algorithm = AlgorithmConfig(loss_aggregation="seq-mean-token-mean", **changes)
        return batch_builder(replace(config("grpo"), algorithm=algorithm), 1)(groups, 1, 0)

    whole = weights()
    assert whole.loss_weights.tolist() == pytest.approx([1 / 9, 1 / 3, 1 / 27])
    overlong = weights(overlong_filtering=True)
    assert overlong.loss_weights.tolist() == pytest.approx([1 / 6, 0, 1 / 18])
    # The group's baseline still includes all three responses.
    assert overlong.advantages.tolist() == whole.advantages.tolist()
    assert weights(filter=f"{tmp_path / 'keep.py'}:short").loss_weights.tolist() == pytest.approx([1 / 6, 1 / 2, 0])
    both = weights(filter=f"{tmp_path / 'keep.py'}:short", overlong_filtering=True)
    assert both.loss_weights.tolist() == pytest.approx([1 / 3, 0, 0])


def test_response_filter_gets_rewards_without_length_penalty(tmp_path):
    (tmp_path / "right.py").write_text(
        "def right(*, rewards, accuracies, group_ids, lengths, clipped):\n    return rewards == 1\n"
    )
    algorithm = AlgorithmConfig(filter=f"{tmp_path / 'right.py'}:right", length_penalty=0.1)
    settings = replace(config("grpo"), algorithm=algorithm)
    batch = batch_builder(settings, 1)(one_group([1.0, 0.0], [4, 2]), 1, 0)
    assert batch.rewards[0] < 1  # the penalty applies to the advantages
    assert (batch.loss_weights > 0).tolist() == [True, False]


def test_response_filter_unloadable_function_names_the_key():
    with pytest.raises(ConfigError, match=r"algorithm\.filter=nowhere\.py:f"):
        batch_builder(Config(algorithm=AlgorithmConfig(filter="nowhere.py:f")), 1)


def several_sequences():
    """Build group 3 with episodes of 2, 1 and 3 sequences, and group 8 with two episodes of one."""
    rewards = np.array([1, 1, 0, 0.5, 0.5, 0.5, 1, 0], np.float32)
    scalars = scalars_of(
        [3] * 6 + [8] * 2,
        [4, 2, 3, 1, 1, 2, 5, 5],
        rewards,
        errors=((2, "raised"), (4, "raised too")),
        parts={"half": rewards / 2},
        episodes=np.array([0, 0, 2, 3, 3, 3, 6, 7]),
        episode_metrics={"episode/turns": np.array([2, 2, 1, 3, 3, 3, 1, 1.0])},
    )
    return Groups((scalars,), (np.arange(8),))


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_response_advantages_count_an_episode_once(name):
    """Oracle: the same episodes as one sequence each, with all their tokens."""
    settings = replace(config(name), trainer=TrainerConfig(prompts_per_step=2, prompts_per_update=2))
    found = batch_builder(settings, 1)(several_sequences(), 1, 0).advantages
    first, second = one_group([1.0, 0.0, 0.5], [6, 3, 4]).scalars[0], one_group([1.0, 0.0], [5, 5]).scalars[0]
    whole = Groups((first, replace(second, group_ids=np.array([8, 8]))), (np.arange(3), np.arange(2)), (None, None))
    expected = batch_builder(settings, 1)(whole, 1, 0).advantages
    assert found.tolist() == expected[[0, 0, 1, 2, 2, 2, 3, 4]].tolist()


def test_describe_counts_each_episode_once():
    groups = several_sequences()
    kept = one_row_per_episode(replace(groups.scalars[0], version_tokens=((3, 20), (4, 3))))
    assert kept.version_tokens == ((3, 20), (4, 3))
    assert kept.rewards.tolist() == [1, 0, 0.5, 1, 0]
    assert kept.errors == ((1, "raised"),)
    assert kept.parts["half"].tolist() == [0.5, 0, 0.25, 0.5, 0]
    assert kept.episodes is None
    described = describe(types.Groups((None,), groups.scalars, groups.keep))
    assert described["reward/mean"].value == 0.5
    assert described["episode/turns"].value == 1.6
    assert described["reward/errors"].value == 1
    assert described["tokens/generated"].value == 23


def test_positions_in_groups_number_responses():
    assert positions_in_groups(np.array([5, 5, 5, 2, 9, 9])).tolist() == [0, 1, 2, 0, 0, 1]
    assert positions_in_groups(np.empty(0, np.int64)).tolist() == []


def test_batch_builder_prompt_mean_has_the_groups_of_each_update():
    """Groups 8 and 3 form the first update, 5 and 4 the second; a response of group 3 is dropped by the filter."""
    scalars = scalars_of([8, 8, 3, 3, 5, 5, 5, 4], [1, 3, 2, 9, 2, 2, 5, 3], [1, 0] * 4)
    scalars = replace(scalars, clipped=np.array([0, 0, 0, 1, 0, 0, 0, 0], np.uint8))
    settings = Config(
        algorithm=AlgorithmConfig(loss_aggregation="prompt-mean", overlong_filtering=True),
        trainer=TrainerConfig(prompts_per_step=4, prompts_per_update=2),
    )
    batch = batch_builder(settings, 1)(Groups((scalars,), (np.arange(8),)), 1, 0)
    expected = [1 / 8, 1 / 8, 1 / 4, 0, 1 / 18, 1 / 18, 1 / 18, 1 / 6]
    assert batch.loss_weights.tolist() == pytest.approx(expected)


def test_batch_builder_gdpo_reads_parts_and_scores_once_per_episode():
    """The second rollout call has no part `half`: its grading failed."""
    first = replace(several_sequences().scalars[0], scores={"judge": np.arange(8.0)})
    second = scalars_of([1, 1], [2, 2], [0, 0], scores={"judge": np.array([1.0, 4.0])})
    groups = Groups((first, second), (np.arange(8), np.arange(2)), (None, None))
    weights = {"half": 1.0, "judge": 0.5}
    settings = Config(
        algorithm=AlgorithmConfig(advantage="gdpo", part_weights=weights),
        trainer=TrainerConfig(prompts_per_step=3, prompts_per_update=3),
    )
    found = batch_builder(settings, 1)(groups, 1, 0).advantages
    rows = [0, 2, 3, 6, 7, 8, 9]
    parts = {
        "half": torch.tensor([*first.parts["half"], torch.nan, torch.nan])[rows],
        "judge": torch.tensor([*first.scores["judge"], *second.scores["judge"]])[rows],
    }
    tensors = {"token_rewards": torch.zeros(7, 1), "mask": torch.ones(7, 1)}
    ids = torch.tensor([3, 3, 3, 8, 8, 1, 1])
    expected = compute_advantages("gdpo", **tensors, group_ids=ids, parts=parts, part_weights=weights).advantages
    assert found.tolist() == pytest.approx(expected[[0, 0, 1, 2, 2, 2, 3, 4, 5, 6], 0].tolist(), rel=1e-6)
    assert found[8] < 0 < found[9]


@pytest.mark.parametrize("name", ["grpo", "gae"])
def test_batch_builder_length_penalty_is_shared_by_an_episode(name):
    """Group 3: 1 of 3 episodes is right, with 6, 3 and 4 tokens; group 8: 1 of 2, with 5 tokens each."""
    algorithm = AlgorithmConfig(advantage=name, normalize_by_std=False if name == "grpo" else None, length_penalty=0.1)
    settings = Config(algorithm=algorithm, trainer=TrainerConfig(prompts_per_step=2, prompts_per_update=2))
    recorded = {}
    build = recorded_batches(settings, 1, TOKENS, estimator(name), recorded.update)
    batch = build(several_sequences(), 1, 0)
    penalties = np.array([0.2, 0.2, 0.1, 0.4 / 3, 0.4 / 3, 0.4 / 3, 0.25, 0.25])
    assert batch.rewards.tolist() == pytest.approx(([1, 1, 0, 0.5, 0.5, 0.5, 1, 0] - penalties).tolist())
    assert recorded["reward/length_penalty"].value == pytest.approx(penalties[[0, 2, 3, 6, 7]].mean())
    if name == "grpo":
        mean = np.mean([1 - 0.2, -0.1, 0.5 - 0.4 / 3])
        assert batch.advantages[:3].tolist() == pytest.approx([0.8 - mean, 0.8 - mean, -0.1 - mean])
