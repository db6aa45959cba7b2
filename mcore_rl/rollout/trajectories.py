"""From requests and what an engine answered to flat trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcore_rl.data.trajectories import offsets_of
from mcore_rl.errors import McoreRLError
from mcore_rl.types import Completion, GenerationRequest, TrajectoryBuffers

MAX_NAMED = 10
"""Requests that an error names."""


def pack_trajectories(requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> TrajectoryBuffers:
    """Flat buffers of prompts followed by their responses; every response token is trained on.

    Raises: McoreRLError naming the requests that came without experts where others have them.
    """
    prompt_tokens = np.array([len(r.token_ids) for r in requests], np.int32)
    response_tokens = np.array([len(c.token_ids) for c in completions], np.int32)
    pieces = [piece for r, c in zip(requests, completions, strict=True) for piece in (r.token_ids, c.token_ids)]
    return TrajectoryBuffers(
        tokens=_concatenate(pieces, np.int32),
        token_offsets=offsets_of(prompt_tokens + response_tokens),
        prompt_tokens=prompt_tokens,
        response_offsets=offsets_of(response_tokens),
        logp_rollout=_concatenate([c.logp for c in completions], np.float32),
        versions=_concatenate([c.versions for c in completions], np.int32),
        trained=np.ones(int(response_tokens.sum()), np.uint8),
        routed_experts=_routed_experts(completions),
    )


def version_spans(versions: np.ndarray) -> list[list[int]]:
    """[version, start, end) of consecutive tokens that the same weights drew. Shapes: versions [T]."""
    edges = np.flatnonzero(np.diff(versions, prepend=-1)).tolist()
    return [[int(versions[start]), start, end] for start, end in zip(edges, [*edges[1:], len(versions)], strict=True)]


def _routed_experts(completions: Sequence[Completion]) -> np.ndarray | None:
    """A row per token, as TrajectoryBuffers has them; None where the engine was not asked for them.

    A response without them cannot be trained on with its own routing, and with another its policy is not the one that
    sampled: the run ends where the request is known, as nothing but a fault of the engine ends one so.
    """
    given = [c.routed_experts for c in completions if c.routed_experts is not None]
    if not given:
        return None
    lacking = [f"{c.request_id} ({c.finish_reason})" for c in completions if c.routed_experts is None]
    if lacking:
        raise McoreRLError(
            f"actor.moe.router_replay=engine: {len(lacking)} of {len(completions)} requests ended without the experts "
            f"of their tokens: {', '.join(lacking[:MAX_NAMED])}"
        )
    ends = np.cumsum([len(experts) + 1 for experts in given])
    rows = np.zeros((int(ends[-1]), *given[0].shape[1:]), given[0].dtype)
    for experts, end in zip(given, ends, strict=True):
        rows[end - 1 - len(experts) : end - 1] = experts
    return rows


def _concatenate(pieces: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.empty(0, dtype)
