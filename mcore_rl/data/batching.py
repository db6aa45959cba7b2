"""Division of a step's kept responses into optimizer updates and data-parallel shares, from scalars only.

Example: groups of 2 responses, prompts_per_update 2, update_epochs 2, 2 data-parallel ranks.

    response        0 1 | 2 3 | 4 5 | 6 7        groups in the order in which they were kept
    update          0 0   0 0   1 1   1 1        `updates` = (0..3), (4..7), then both again, reordered
    dp rank         0 1   1 0   1 0   0 1        balanced by cost within each update, equal in every epoch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from mcore_rl.data.packing import TOKENS, SequenceCost, balance
from mcore_rl.errors import ConfigError
from mcore_rl.types import Batch, BuffersRef, Mean, RolloutScalars

LossWeights = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Function (trained tokens int32 [b], group ids int64 [b]) of the responses of one update -> loss weights float32
[b]."""


@dataclass(frozen=True)
class UpdateSchedule:
    """Division of a step's groups into optimizer updates.

    seed: orders the updates of every epoch after the first, for example (run.seed, step).
    cost: work that is balanced over data-parallel ranks.
    """

    prompts_per_update: int
    update_epochs: int = 1
    num_dp_ranks: int = 1
    seed: tuple[int, ...] = (0,)
    cost: SequenceCost = TOKENS


@dataclass(frozen=True)
class KeptSamples:
    """Scalars of the kept responses, joined over rollout calls. Advantages are computed from them.

    Shapes: every array [B]. chunk_ids and rows (int32) locate the tokens; the other fields are as in RolloutScalars.
    episodes (int64): one number per episode; the responses of an episode share it and have one reward.
    roles (int64): number of the response's role among the names of all responses; 0 for all without names.
    other_rewards (float32): see RolloutScalars; 0 without roles.
    parts (float64 [B] by name): parts and scores of RolloutScalars; NaN if a response has none.
    """

    chunk_ids: np.ndarray
    rows: np.ndarray
    group_ids: np.ndarray
    prompt_rows: np.ndarray
    total_tokens: np.ndarray
    response_tokens: np.ndarray
    trained_tokens: np.ndarray
    rewards: np.ndarray
    accuracies: np.ndarray
    clipped: np.ndarray
    episodes: np.ndarray
    roles: np.ndarray
    other_rewards: np.ndarray
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)


_SCALARS = {
    **dict.fromkeys(("total_tokens", "response_tokens", "trained_tokens"), np.int32),
    **dict.fromkeys(("rewards", "accuracies"), np.float32),
    **dict.fromkeys(("group_ids", "prompt_rows"), np.int64),
    "clipped": np.uint8,
}
"""Fields that KeptSamples has from RolloutScalars."""


def gather(scalars: Sequence[RolloutScalars], keep: Sequence[np.ndarray] | None = None) -> KeptSamples:
    """Join the responses `keep[i]` (None: all) of all rollout calls i, in call order."""
    keep = [np.arange(len(part.group_ids)) for part in scalars] if keep is None else keep

    def join(parts: Iterable[np.ndarray], dtype: type) -> np.ndarray:
        # np.concatenate rejects an empty list, but a step may keep nothing; _cut reports that.
        return np.concatenate([*parts, np.empty(0, dtype)]).astype(dtype, copy=False)

    kept = list(zip(scalars, keep, strict=True))
    numbers = [{**part.scores, **part.parts} for part in scalars]
    names = dict.fromkeys(name for each in numbers for name in each)

    def column(name: str) -> np.ndarray:
        # A rollout call has only the parts that its graders returned.
        parts = zip(numbers, keep, strict=True)
        return join((each[name][rows] if name in each else np.full(len(rows), np.nan) for each, rows in parts), float)

    # Episode numbers are unique within a rollout call only; add the number of preceding responses.
    starts = np.cumsum([0, *(len(part.rewards) for part in scalars)])
    episodes = [
        start + (rows if part.episodes is None else part.episodes[rows])
        for (part, rows), start in zip(kept, starts, strict=False)
    ]
    names_of_roles = [np.full(len(r), "") if part.roles is None else part.roles[r] for part, r in kept]
    others = [np.zeros(len(r)) if part.other_rewards is None else part.other_rewards[r] for part, r in kept]
    return KeptSamples(
        chunk_ids=np.repeat(np.arange(len(keep), dtype=np.int32), [len(rows) for rows in keep]),
        rows=join(keep, np.int32),
        episodes=join(episodes, np.int64),
        roles=np.unique(np.concatenate([*names_of_roles, np.empty(0, "U1")]), return_inverse=True)[1],
        other_rewards=join(others, np.float32),
        parts={name: column(name) for name in names},
        **{name: join((getattr(part, name)[rows] for part, rows in kept), dtype) for name, dtype in _SCALARS.items()},
    )


def positions_in_groups(group_ids: np.ndarray) -> np.ndarray:
    """Number the responses of each group 0, 1, ...; groups must be consecutive. Shapes: [B] -> int64 [B]."""
    # The prepended value differs from the first id, so the first group has a start, too; it is empty without ids.
    starts = np.flatnonzero(np.diff(group_ids, prepend=group_ids[:1] - 1))
    sizes = np.diff([*starts, len(group_ids)])
    return np.arange(len(group_ids)) - np.repeat(starts, sizes)


def one_row_per_episode(scalars: RolloutScalars) -> RolloutScalars:
    """Keep only the first response of each episode."""
    if scalars.episodes is None:
        return scalars
    # The number of an episode is the index of its first response.
    return _rows_of_episodes(scalars, np.flatnonzero(scalars.episodes == np.arange(len(scalars.episodes))))


def one_row_per_role(scalars: RolloutScalars) -> RolloutScalars:
    """Keep only the first response of each role of each episode, with the reward of the role: without the rewards of
    turns of other roles. Responses of episodes without roles have the role ""."""
    if scalars.roles is None or scalars.other_rewards is None or scalars.episodes is None:
        return one_row_per_episode(scalars)
    numbers = np.unique(scalars.roles, return_inverse=True)[1]
    _, first = np.unique(scalars.episodes * len(scalars.roles) + numbers, return_index=True)
    own = replace(scalars, rewards=scalars.rewards - scalars.other_rewards)
    return _rows_of_episodes(own, np.sort(first))


def _rows_of_episodes(scalars: RolloutScalars, rows: np.ndarray) -> RolloutScalars:
    """Select one row of each episode or role. Shapes: int64 [E]."""
    place = {row: index for index, row in enumerate(rows.tolist())}
    changed: dict[str, Any] = {"errors": tuple((place[row], error) for row, error in scalars.errors if row in place)}
    for each in fields(RolloutScalars):
        value = getattr(scalars, each.name)
        if isinstance(value, np.ndarray):
            changed[each.name] = value[rows]
        elif isinstance(value, Mapping):
            changed[each.name] = {key: values[rows] for key, values in value.items()}
    return replace(scalars, **(changed | {"episodes": None}))


def build_batch(
    chunks: Sequence[BuffersRef],
    kept: KeptSamples,
    *,
    schedule: UpdateSchedule,
    advantages: np.ndarray | None = None,
    weights_of: LossWeights | None = None,
    trained: np.ndarray | None = None,
    loss_factors: np.ndarray | None = None,
    losses: np.ndarray | None = None,
    version: int = 0,
) -> Batch:
    """Build the batch of one training step.

    Whole groups, in the order in which they were kept, form updates of `prompts_per_update` groups. Later epochs repeat
    the same updates in another order. A response keeps its update, and so its loss weight and its data-parallel rank,
    which stores the results of earlier passes (log-probabilities), are equal in all epochs.

    Shapes: advantages float32 [B] in the order of `kept`, None: 0.
    weights_of: computes the loss weights of one update; None: 0, for a batch that is not trained.
    loss_factors: float32 [B], multiply the loss weights and the observation weights; None: 1. Responses with 0 do not
    count in the observation weights of the others.
    losses: int32 [B], see Batch.
    trained: bool [B]; other responses have weight 0 and do not count in the weights of the others.
    version: weight version at the start of the step.
    Raises: ConfigError if no response is kept or prompts_per_update does not divide the number of groups.
    """
    advantages = np.zeros(len(kept), np.float32) if advantages is None else advantages
    if len(advantages) != len(kept):
        raise ValueError(f"{len(advantages)} advantages for {len(kept)} kept responses")
    first_epoch = _cut(kept.group_ids, schedule.prompts_per_update)
    dp_ranks = np.empty(len(kept), np.int32)
    for samples in first_epoch:
        dp_ranks[samples] = balance(schedule.cost.of(kept.total_tokens[samples]), schedule.num_dp_ranks)
    loss_weights, observation_weights = _weights(kept, first_epoch, weights_of, trained, loss_factors)
    return Batch(
        chunks=tuple(chunks),
        chunk_ids=kept.chunk_ids,
        rows=kept.rows,
        group_ids=kept.group_ids,
        total_tokens=kept.total_tokens,
        trained_tokens=kept.trained_tokens,
        rewards=kept.rewards,
        advantages=np.asarray(advantages, np.float32),
        loss_weights=loss_weights,
        dp_ranks=dp_ranks,
        updates=_repeat(first_epoch, schedule),
        version=version,
        observation_weights=observation_weights,
        losses=losses,
    )


def _weights(
    kept: KeptSamples,
    updates: Sequence[np.ndarray],
    weights_of: LossWeights | None,
    trained: np.ndarray | None,
    loss_factors: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the loss weights and the observation weights of all responses, see build_batch.

    Shapes: updates: indices of each update; results float32 [B].
    """
    loss_weights, observation_weights = np.zeros((2, len(kept)), np.float32)
    if weights_of is None:
        return loss_weights, observation_weights
    # Responses that are not trained have no tokens for the denominators of the loss weights.
    counted = kept.trained_tokens if trained is None else np.where(trained, kept.trained_tokens, 0)
    factors = np.ones(len(kept), np.float32) if loss_factors is None else loss_factors
    for samples in updates:
        loss_weights[samples] = weights_of(counted[samples], kept.group_ids[samples])
        is_counted = (counted[samples] > 0) & (factors[samples] != 0)
        observation_weights[samples] = is_counted / max(is_counted.sum(), 1)
    loss_weights *= factors
    observation_weights *= factors
    return loss_weights, observation_weights


def spread(batch: Batch, num_ranks: int, other_ranks: int, cost: SequenceCost = TOKENS) -> Batch:
    """Reassign a batch to the data-parallel ranks of another model.

    The samples of one rank are split over consecutive ranks of the larger model, or the samples of consecutive ranks
    are merged on one rank of the smaller model.

    Raises: ValueError unless one number of ranks divides the other.
    """
    if num_ranks % other_ranks and other_ranks % num_ranks:
        raise ValueError(f"{num_ranks} and {other_ranks} data-parallel ranks: one number must divide the other")
    if other_ranks <= num_ranks:
        return replace(batch, dp_ranks=(batch.dp_ranks * other_ranks // num_ranks).astype(np.int32))
    run, dp_ranks = other_ranks // num_ranks, np.empty_like(batch.dp_ranks)
    for update in batch.updates:
        for rank in range(num_ranks):
            samples = np.sort(update[batch.dp_ranks[update] == rank])
            dp_ranks[samples] = rank * run + balance(cost.of(batch.total_tokens[samples]), run)
    return replace(batch, dp_ranks=dp_ranks)


def rank_balance(batch: Batch, cost: SequenceCost, num_dp_ranks: int) -> Mean:
    """Return the mean over updates of (mean cost of a data-parallel rank) / (largest cost of a rank); 1 is ideal."""
    costs = cost.of(batch.total_tokens)
    loads = [np.bincount(batch.dp_ranks[update], costs[update], num_dp_ranks) for update in batch.updates]
    return Mean(float(sum(load.mean() / load.max() for load in loads)), len(loads))


def _cut(group_ids: np.ndarray, prompts_per_update: int) -> list[np.ndarray]:
    """Return the response indices of each update, in ascending order."""
    if not len(group_ids):
        raise ConfigError("a step kept no response; raise algorithm.dynamic_sampling.max_batches")
    _, first, inverse = np.unique(group_ids, return_index=True, return_inverse=True)
    num_groups = len(first)
    if num_groups % prompts_per_update:
        raise ConfigError(
            f"trainer.prompts_per_update={prompts_per_update} does not divide the {num_groups} groups of a step;"
            " set it to a divisor of trainer.prompts_per_step"
        )
    # Group ids are arbitrary; number the groups by their first kept response.
    ordinal = np.empty(num_groups, np.int64)
    ordinal[np.argsort(first)] = np.arange(num_groups)
    update_of = ordinal[inverse] // prompts_per_update
    order = np.argsort(update_of, kind="stable")
    ends = np.cumsum(np.bincount(update_of))
    return np.split(order, ends[:-1])


def _repeat(first_epoch: list[np.ndarray], schedule: UpdateSchedule) -> tuple[np.ndarray, ...]:
    updates = list(first_epoch)
    for epoch in range(1, schedule.update_epochs):
        # Sort raw bits: numpy guarantees the stream of a bit generator across versions, but not its shuffles.
        bits = np.random.PCG64(np.random.SeedSequence([*schedule.seed, epoch])).random_raw(len(first_epoch))
        updates += [first_epoch[index] for index in np.argsort(bits, kind="stable")]
    return tuple(updates)
