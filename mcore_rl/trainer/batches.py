"""Conversion of collected groups to a training batch and to the step's metrics; scalars only, on the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from mcore_rl.algorithms import Estimator, advantage_options, compute_advantages, estimator
from mcore_rl.algorithms.aggregation import MODE_OPTIONS, loss_weights
from mcore_rl.algorithms.filters import user_filter
from mcore_rl.algorithms.interface import MAX_NAMED
from mcore_rl.algorithms.length_penalty import length_penalties
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.schema import Config
from mcore_rl.data.batching import (
    KeptSamples,
    LossWeights,
    UpdateSchedule,
    build_batch,
    gather,
    one_row_per_episode,
    one_row_per_role,
    rank_balance,
)
from mcore_rl.data.packing import TOKENS, SequenceCost
from mcore_rl.errors import NonFiniteError
from mcore_rl.trainer.diagnostics import (
    column,
    describe_advantages,
    describe_columns,
    describe_groups,
    describe_lengths,
    describe_signal,
)
from mcore_rl.trainer.sources import SourceRules, Sources, teacher_numbers
from mcore_rl.types import Batch, Groups, Max, Mean, Metric, RolloutScalars, Total

BatchBuilder = Callable[[Groups, int, int], Batch]
"""Function (groups, step, weight version at the start of the step) -> Batch."""


def recorded_batches(
    config: Config,
    dp_size: int,
    cost: SequenceCost,
    chosen: Estimator,
    record: Callable[[dict[str, Metric]], None],
    sources: Sources | None = None,
) -> BatchBuilder:
    """Return the function of `batch_builder`, which also passes the metrics of each batch to `record`."""
    build = batch_builder(config, dp_size, cost, sources)

    def batch_of(groups: Groups, step: int, version: int) -> Batch:
        batch = build(groups, step, version)
        record({"actor/balance": rank_balance(batch, cost, dp_size)})
        untrained = Mean(float((batch.loss_weights == 0).sum()), len(batch))
        record({"groups/untrained_responses": untrained})
        if per_token := config.algorithm.length_penalty:
            kept = gather(groups.scalars, groups.keep)
            _, first = np.unique(_compared(kept, config.algorithm.baseline)[0], return_index=True)
            penalties = episode_penalties(per_token, kept, config.algorithm.baseline)[first]
            record({"reward/length_penalty": Mean(float(penalties.sum(dtype=np.float64)), len(first))})
        if chosen.per_response:
            record(describe_advantages(batch.advantages))
        return batch

    return batch_of


def batch_builder(
    config: Config, dp_size: int, cost: SequenceCost = TOKENS, sources: Sources | None = None
) -> BatchBuilder:
    """Return a function that builds the batch of a step.

    The batch has the configured advantages and loss weights; `cost` is divided evenly among data-parallel ranks.
    Per-token estimators leave the advantages at 0 here: the ranks compute them. sources: of the training prompts, for
    settings that depend on them.

    Raises: NonFiniteError (from the function) naming responses with non-finite rewards.
    """
    algorithm = config.algorithm
    per_response = estimator(algorithm.advantage, **advantage_options(algorithm)).per_response
    advantages_of = response_advantages(algorithm, sources)
    rules = SourceRules(algorithm, sources)
    weights_of = response_weights(algorithm, config.rollout.max_response_tokens)
    is_trained = response_filter(algorithm)
    penalties_of = partial(episode_penalties, algorithm.length_penalty, baseline=algorithm.baseline)

    def build(groups: Groups, step: int, version: int) -> Batch:
        kept = gather(groups.scalars, groups.keep)
        check_rewards(kept)
        # Only the advantages change with the penalty: algorithm.filter gets the rewards of reward.function.
        trained = is_trained(kept)
        kept = replace(kept, rewards=kept.rewards - penalties_of(kept))
        advantages = advantages_of(groups, kept.rewards) if per_response else np.zeros(len(kept), np.float32)
        schedule = UpdateSchedule(
            config.trainer.prompts_per_update, config.trainer.update_epochs, dp_size, (config.run.seed, step), cost
        )
        batch = build_batch(
            groups.chunks,
            kept,
            advantages=advantages,
            weights_of=weights_of,
            schedule=schedule,
            trained=trained,
            loss_factors=rules.loss_weights(kept.prompt_rows),
            losses=rules.losses(kept.prompt_rows),
            version=version,
        )
        if sources is None or not config.teacher.by_source:
            return batch
        return replace(batch, teachers=teacher_numbers(config.teacher, sources, kept.prompt_rows))

    return build


def response_filter(config: AlgorithmConfig) -> Callable[[KeptSamples], np.ndarray]:
    """Return a function that selects the trained responses, bool [B], by algorithm.overlong_filtering and
    algorithm.filter.

    Raises: ConfigError if the user's function cannot be loaded, and from the filter if its result is invalid.
    """
    users = user_filter("algorithm.filter", config.filter) if config.filter is not None else None

    def trained(kept: KeptSamples) -> np.ndarray:
        # Responses that are filtered out stay in the batch with weight 0, and in the baseline of their group. Overlong
        # filtering (DAPO, arXiv 2503.14476, section 3.4): a truncated response has no answer, so its reward carries no
        # information about its tokens.
        keep = kept.clipped == 0 if config.overlong_filtering else np.ones(len(kept), bool)
        if users is None:
            return keep
        return keep & users(
            rewards=kept.rewards,
            accuracies=kept.accuracies,
            group_ids=kept.group_ids,
            lengths=kept.response_tokens,
            clipped=kept.clipped,
        )

    return trained


def response_advantages(
    algorithm: AlgorithmConfig, sources: Sources | None = None
) -> Callable[[Groups, np.ndarray], np.ndarray]:
    """Return a function (groups, rewards of the kept responses) -> advantages, for estimators that need no per-token
    data. sources: of the training prompts, for settings that depend on them.

    Shapes: float32 [B] -> float32 [B], in the order of `gather`.
    """
    rules = SourceRules(algorithm, sources)
    estimators = [(settings.advantage, advantage_options(settings), own) for settings, own in rules.estimators()]
    needs = estimator(algorithm.advantage, **advantage_options(algorithm)).needs

    def advantages_of(groups: Groups, rewards: np.ndarray) -> np.ndarray:
        kept = gather(groups.scalars, groups.keep)
        episodes, group_ids = _compared(kept, algorithm.baseline)
        if algorithm.baseline == "role":
            rewards = rewards - kept.other_rewards
        _, first, episode = np.unique(episodes, return_index=True, return_inverse=True)
        source_ids = rules.numbers(kept.prompt_rows[first])
        inputs = {
            "rewards": rewards[first],
            "group_ids": source_ids if algorithm.baseline == "source" else group_ids[first],
            "lengths": np.bincount(episode, kept.trained_tokens).astype(np.int32),
        }
        if needs.baseline_rewards:
            inputs["baseline_rewards"] = greedy_rewards(groups.greedy, kept.group_ids[first])
        parts = {name: values[first] for name, values in kept.parts.items()}
        advantages = np.zeros(len(first), np.float32)
        for name, options, own in estimators:
            rows = np.arange(len(first)) if own is None else np.flatnonzero(np.isin(source_ids, own))
            columns = {key: torch.from_numpy(values[rows]) for key, values in inputs.items()}
            advantages[rows] = _estimate(name, options, columns, {key: part[rows] for key, part in parts.items()})
        return advantages[episode]

    return advantages_of


def _compared(kept: KeptSamples, baseline: str) -> tuple[np.ndarray, np.ndarray]:
    """Number what counts once in a group, and the groups: episodes, even if they consist of several sequences, or with
    baseline=role the roles of episodes, which are compared with the same role. Shapes: int64 [B] each."""
    if baseline != "role":
        return kept.episodes, kept.group_ids
    return _pairs(kept.episodes, kept.roles), _pairs(kept.group_ids, kept.roles)


def _pairs(ids: np.ndarray, roles: np.ndarray) -> np.ndarray:
    """Number the pairs of an id and a role. Shapes: int64 [B] each -> int64 [B]."""
    numbers = np.unique(ids, return_inverse=True)[1]
    result: np.ndarray = numbers * (int(roles.max(initial=0)) + 1) + roles
    return result


def _estimate(
    name: str, options: dict[str, object], columns: dict[str, torch.Tensor], parts: dict[str, np.ndarray]
) -> np.ndarray:
    """Compute the advantages of responses. Shapes: columns and parts [B] -> float32 [B]."""
    rewards = columns.pop("rewards")[:, None]
    # One token per response stands for the whole response, because these estimators use no per-token rewards.
    estimates = compute_advantages(
        name,
        token_rewards=rewards,
        mask=torch.ones_like(rewards),
        parts={key: torch.from_numpy(part) for key, part in parts.items()},
        **columns,
        **options,
    )
    advantages: np.ndarray = estimates.advantages[:, 0].numpy()
    return advantages


def episode_penalties(per_token: float, kept: KeptSamples, baseline: str) -> np.ndarray:
    """Compute the length penalty of each kept response. The responses of an episode share the penalty of all their
    tokens; with baseline=role, the responses of a role in the episode do. Shapes: float32 [B]."""
    episodes, group_ids = _compared(kept, baseline)
    _, first, episode = np.unique(episodes, return_index=True, return_inverse=True)
    penalties = length_penalties(
        per_token,
        lengths=np.bincount(episode, kept.trained_tokens),
        accuracies=kept.accuracies[first],
        group_ids=group_ids[first],
    )
    result: np.ndarray = penalties[episode].astype(np.float32)
    return result


def check_rewards(kept: KeptSamples) -> None:
    """Raise NonFiniteError naming responses with non-finite rewards, before they are trained."""
    bad = np.flatnonzero(~np.isfinite(kept.rewards))
    if len(bad):
        named = ", ".join(f"sample {i} (group {kept.group_ids[i]}): {kept.rewards[i]}" for i in bad[:MAX_NAMED])
        raise NonFiniteError(f"the rewards of {len(bad)} responses are not finite: {named}; check reward.function")


def greedy_rewards(greedy: Sequence[RolloutScalars], group_ids: np.ndarray) -> np.ndarray:
    """Return the reward of the greedy response in each response's group.

    Shapes: group_ids int64 [B] -> float32 [B].
    """
    # The greedy responses may be in another order than the groups.
    reward_of = dict(zip(column(greedy, "group_ids").tolist(), column(greedy, "rewards").tolist(), strict=True))
    return np.array([reward_of[group] for group in group_ids.tolist()], np.float32)


def response_weights(algorithm: AlgorithmConfig, longest: int) -> LossWeights:
    """Return the function that computes loss_weights for the configured aggregation; seq-mean-token-sum-norm divides by
    `longest`, which is rollout.max_response_tokens."""
    mode = algorithm.loss_aggregation
    if "norm_tokens" in MODE_OPTIONS.get(mode, ()):
        return partial(loss_weights, mode, norm_tokens=longest)
    return partial(loss_weights, mode)


def describe(groups: Groups, unpunished_tokens: int | None = None, baseline: str = "prompt") -> dict[str, Metric]:
    """Compute the metrics of all generated responses, trained or not. Rewards and similar metrics count each episode
    once. unpunished_tokens: see describe_signal; baseline: algorithm.baseline."""
    responses = sum(len(s.rewards) for s in groups.scalars)
    tokens = column(groups.scalars, "response_tokens")
    episodes = [one_row_per_episode(s) for s in groups.scalars]
    if baseline == "role":
        compared = [one_row_per_role(s) for s in groups.scalars]
    else:
        compared = [replace(each, roles=None) for each in episodes]
    return {
        "reward/mean": _mean(episodes, "rewards"),
        "reward/accuracy": _mean(episodes, "accuracies"),
        "reward/errors": Total(sum(len(s.errors) for s in episodes)),
        "response_tokens/mean": Mean(float(tokens.sum()), responses),
        "response_tokens/max": Max(float(tokens.max(initial=0))),
        "response_tokens/clipped_fraction": _mean(groups.scalars, "clipped"),
        **groups.metrics,
        "tokens/generated": Total(float(tokens.sum())),
        "tokens/trained_sequences": Total(float(gather(groups.scalars, groups.keep).total_tokens.sum())),
        **describe_columns([each.parts for each in episodes], "reward/"),
        # Scores of reward models, before weighting.
        **describe_columns([each.scores for each in episodes], "reward/"),
        **describe_columns([each.episode_metrics for each in episodes]),
        **({"reward/greedy": _mean(groups.greedy, "rewards")} if groups.greedy else {}),
        **describe_groups(episodes),
        **describe_signal(compared, unpunished_tokens),
        **describe_lengths(groups.scalars),
    }


def _mean(scalars: Sequence[RolloutScalars], name: str) -> Mean:
    values = column(scalars, name)
    return Mean(float(values.sum(dtype=np.float64)), len(values))
