"""Per-token values of a few responses per step: tokens/step_<n>.jsonl, which a trainer rank writes.

The key `digest` connects a line with the response of the same step in rollouts/step_<n>.jsonl.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TypeGuard

from mcore_rl.config.observe import TOKEN_VALUES
from mcore_rl.observe.report.run_files import finite, json_lines
from mcore_rl.observe.report.token_pieces import Pieces
from mcore_rl.types.json import JsonObject

MAX_TOKENS = 4096
"""Tokens of a response that are shown."""


@dataclass(frozen=True)
class TokenValues:
    """Tokens of one response.

    logp_rollout, logp_policy: log-probabilities of engine and trainer, one per trained token; None if not finite.
    Units: nats.
    """

    digest: int
    token_ids: list[int]
    logp_rollout: list[float | None]
    logp_policy: list[float | None]


def token_values_path(run_dir: Path, step: int) -> Path:
    return run_dir / TOKEN_VALUES / f"step_{step}.jsonl"


def read_token_values(run_dir: Path, step: int, notes: list[str]) -> list[TokenValues]:
    """Read the per-token values of a step; [] if none are recorded. Records of another form are left out."""
    path = token_values_path(run_dir, step)
    values = [_parsed(record) for record in json_lines(path, notes)]
    if unknown := values.count(None):
        notes.append(f"{TOKEN_VALUES}/{path.name}: {unknown} lines have an unknown form and are left out")
    return [each for each in values if each is not None]


def shown_values(values: TokenValues, pieces: Pieces) -> dict[str, object]:
    """Return the values of the first MAX_TOKENS tokens for the page, with the text of each token."""
    texts = pieces.split(values.token_ids[:MAX_TOKENS])
    return {
        "digest": values.digest,
        "texts": texts,
        "engine": [_short(value) for value in values.logp_rollout[: len(texts)]],
        "trainer": [_short(value) for value in values.logp_policy[: len(texts)]],
    }


def _parsed(record: JsonObject) -> TokenValues | None:
    digest, ids = record.get("digest"), record.get("token_ids")
    rollout, policy = record.get("logp_rollout"), record.get("logp_policy")
    if not (isinstance(digest, int) and _are_numbers(ids, int)):
        return None
    if not all(0 <= token < 2**31 for token in ids):
        return None
    if not (_are_numbers(rollout, int | float | None) and _are_numbers(policy, int | float | None)):
        return None
    return TokenValues(digest, ids, rollout, policy)


def _are_numbers(value: object, kind: type | UnionType) -> TypeGuard[list]:  # type: ignore[type-arg]
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def _short(value: float | None) -> float | None:
    # Also an integer beyond the range of floats.
    number = finite(value)
    return None if number is None else round(number, 4)


def spans_of_zeros(mask: list[int]) -> list[list[int]]:
    """Return [first, end] of each run of zeros."""
    spans, place = [], 0
    for value, members in itertools.groupby(mask, bool):
        length = len(list(members))
        if not value:
            spans.append([place, place + length])
        place += length
    return spans
