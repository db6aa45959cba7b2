"""Packing of trajectories into flat buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from mcore_rl.data.trajectories import compact_temperatures, distinct_images, hint_arrays, offsets_of
from mcore_rl.errors import McoreRLError
from mcore_rl.types import NOT_SAMPLED, Prompt, TokenSets, Trajectory, TrajectoryBuffers

MAX_NAMED = 10
"""Maximum number of requests named in an error."""


def pack_trajectories(
    trajectories: Sequence[Trajectory], names: Sequence[str] = (), hints: Sequence[np.ndarray | None] = ()
) -> TrajectoryBuffers:
    """Pack prompts, each followed by its response, into flat buffers. `names` of the trajectories are used in error
    messages; default: numbers. `hints`: prompt of each trajectory with its hint, see hinted_prompt; default: none.

    Raises: McoreRLError naming trajectories without routed experts or sampling sets if others have them.
    """
    prompt_tokens = np.array([len(t.prompt_ids) for t in trajectories], np.int32)
    response_tokens = np.array([len(t.token_ids) for t in trajectories], np.int32)
    pieces = [piece for t in trajectories for piece in (t.prompt_ids, t.token_ids)]
    images, image_rows = distinct_images([t.images for t in trajectories])
    kept = _kept(trajectories, names)
    hint_tokens, hint_offsets = hint_arrays(hints)
    has_turns = any(t.rewards is not None for t in trajectories)
    return TrajectoryBuffers(
        tokens=_concatenate(pieces, np.int32),
        token_offsets=offsets_of(prompt_tokens + response_tokens),
        prompt_tokens=prompt_tokens,
        response_offsets=offsets_of(response_tokens),
        logp_rollout=_concatenate([t.logp for t in trajectories], np.float32),
        versions=_concatenate([t.versions for t in trajectories], np.int32),
        trained=_filled([t.trained for t in trajectories], response_tokens, 1, np.uint8),
        routed_experts=_routed_experts(trajectories, names),
        turn_rewards=_filled([t.rewards for t in trajectories], response_tokens, 0, np.float32) if has_turns else None,
        temperatures=compact_temperatures(
            _filled([t.temperatures for t in trajectories], response_tokens, np.nan, np.float32)
        ),
        images=images,
        image_rows=image_rows,
        kept_words=None if kept is None else kept.words,
        kept_offsets=None if kept is None else kept.offsets,
        hint_tokens=hint_tokens,
        hint_offsets=hint_offsets,
    )


def hinted_prompt(trajectory: Trajectory, prompt: Prompt, max_response_tokens: int) -> np.ndarray | None:
    """Return the prompt of a trajectory with the hint of its row: int32 [H], empty without a hint; None: not read.

    An episode may start a sequence whose prompt continues the row's prompt; the tokens after it are kept. There is no
    hint for a sequence that does not start with the row's prompt, or has more than `max_response_tokens` after it, for
    which the teacher's rows have no room.
    """
    hint, own = prompt.hint_ids, len(prompt.token_ids)
    if hint is None or not len(hint):
        return hint
    later = trajectory.prompt_ids[own:]
    starts = np.array_equal(trajectory.prompt_ids[:own], prompt.token_ids)
    if not starts or len(later) + len(trajectory.token_ids) > max_response_tokens:
        return hint[:0]
    return np.concatenate([hint, later])


def version_spans(versions: np.ndarray) -> list[list[int]]:
    """Return [version, start, end) of consecutive tokens sampled with the same weights. Shapes: versions [T]."""
    return [[int(version), first, last] for version, first, last in _runs(versions) if version != NOT_SAMPLED]


def temperature_spans(temperatures: np.ndarray) -> list[list[float]]:
    """Return [temperature, start, end) of consecutive tokens with the same sampling temperature. Shapes: temperatures
    [T]."""
    # str gives the shortest form of a float32: 0.7 instead of 0.699999988079071.
    return [[float(str(value)), first, last] for value, first, last in _runs(temperatures) if not np.isnan(value)]


def _runs(values: np.ndarray) -> list[tuple[np.generic, int, int]]:
    """Return (value, start, end) of consecutive equal values; each NaN is a run of its own."""
    cuts = np.flatnonzero(values[1:] != values[:-1]) + 1
    edges = itertools.pairwise([0, *cuts.tolist(), len(values)])
    return [(values[first], first, last) for first, last in edges if first < last]


def _filled(given: Sequence[np.ndarray | None], lengths: np.ndarray, value: float, dtype: type) -> np.ndarray:
    """Concatenate; entries that are None are filled with `value`."""
    pairs = zip(given, lengths, strict=True)
    return _concatenate([np.full(length, value) if part is None else part for part, length in pairs], dtype)


def _routed_experts(trajectories: Sequence[Trajectory], names: Sequence[str]) -> np.ndarray | None:
    """Return one row per token (see TrajectoryBuffers), or None if experts were not recorded.

    A response without routed experts cannot be trained: with a different routing, the trained policy is not the policy
    that sampled. Only a defect of the engine causes this, so the run ends here, where the request is known.
    """
    given = [t.routed_experts for t in trajectories if t.routed_experts is not None]
    if not given:
        return None
    called = names or [str(number) for number in range(len(trajectories))]
    lacking = [name for name, t in zip(called, trajectories, strict=True) if t.routed_experts is None]
    if lacking:
        raise McoreRLError(
            f"actor.moe.router_replay=engine: {len(lacking)} of {len(trajectories)} responses ended without the "
            f"experts of their tokens: {', '.join(lacking[:MAX_NAMED])}"
        )
    # Engines give no experts for a response's last token, which was never an input; its row stays 0.
    ends = np.cumsum([len(experts) + 1 for experts in given])
    rows = np.zeros((int(ends[-1]), *given[0].shape[1:]), given[0].dtype)
    for experts, end in zip(given, ends, strict=True):
        rows[end - 1 - len(experts) : end - 1] = experts
    return rows


def _kept(trajectories: Sequence[Trajectory], names: Sequence[str]) -> TokenSets | None:
    """Join the sets of all response tokens; None if none were recorded."""
    given = [t.kept for t in trajectories if t.kept is not None]
    if given and len(given) < len(trajectories):
        called = names or [str(number) for number in range(len(trajectories))]
        lacking = [name for name, t in zip(called, trajectories, strict=True) if t.kept is None]
        raise McoreRLError(
            f"rollout.keep_sampling_mask=true: {len(lacking)} of {len(trajectories)} responses ended without the sets "
            f"that their tokens were sampled from: {', '.join(lacking[:MAX_NAMED])}"
        )
    return TokenSets.joined(given) if given else None


def _concatenate(pieces: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.empty(0, dtype)
