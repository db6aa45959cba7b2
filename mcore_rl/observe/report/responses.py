"""Statistics of all responses, and a bounded sample of them for the report's browser."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from mcore_rl.observe.report.pages import GROUP_BYTES, TOKEN_BYTES, Blocks, evenly
from mcore_rl.observe.report.run_files import RolloutFile, RunFiles, json_lines
from mcore_rl.observe.report.sample import ResponseSample, has_digest
from mcore_rl.observe.report.statistics import EDGES, is_right
from mcore_rl.observe.report.token_pieces import Pieces
from mcore_rl.observe.report.token_values import read_token_values, shown_values
from mcore_rl.types.json import JsonObject

MAX_FILES = 2000
"""Number of rollout files that are read; runs with more are sampled at equal distances."""
TOKEN_PAGE_BYTES = 60_000
"""Size of the per-token values of a step; with many steps, some have none."""
TRUNCATED = ("length", "turns", "tool_calls", "seconds")
"""Finish reasons of responses that a limit ended."""


@dataclass
class ResponseSummary:
    """Small facts about the responses of a run, which the page needs at once; parallel lists have one entry per step.

    steps, rates, lengths: training steps, StepStatistics.solve_rates and .lengths of each.
    pages: [name of the block, step, is_validation, responses in the block, responses of the step].
    index: columns with one entry per response in the blocks, in their order, for the filters.
    """

    steps: list[int] = field(default_factory=list)
    rates: list[list[int]] = field(default_factory=list)
    lengths: list[tuple[list[int], list[int]]] = field(default_factory=list)
    pages: list[list[object]] = field(default_factory=list)
    index: dict[str, list[object]] = field(default_factory=dict)
    edges: tuple[int, ...] = EDGES


def add_responses(blocks: Blocks, run: RunFiles, prefix: str, num_runs: int, pieces: Pieces) -> ResponseSummary:
    """Read the responses of a run, and add blocks with a sample of each step.

    `prefix` starts the names of the run's blocks; each of `num_runs` runs has an equal share of the page.
    """
    summary = ResponseSummary()
    files = [run.rollouts[place] for place in evenly(range(len(run.rollouts)), MAX_FILES)]
    if len(files) < len(run.rollouts):
        run.notes.append(f"{len(files)} of {len(run.rollouts)} files with responses are read, at equal distances")
    training = [file.step for file in files if not file.is_validation]
    with_tokens = set(evenly(training, max(1, TOKEN_BYTES // (TOKEN_PAGE_BYTES * num_runs))))
    # Shares of one file and one step.
    parts, token_parts = max(len(files), 1) * num_runs, max(len(with_tokens), 1) * num_runs
    token_bytes = min(TOKEN_PAGE_BYTES, TOKEN_BYTES // token_parts)
    for file in files:
        tokens = _add_tokens(blocks, run, file, prefix, pieces, token_bytes) if file.step in with_tokens else set()
        name, sample = f"{prefix}responses{len(summary.pages)}", ResponseSample(file.step, tokens, parts)
        for line, record in enumerate(json_lines(file.path, run.notes)):
            sample.add(line, record)
        shown = sample.add_fitting(blocks, name)
        if not file.is_validation:
            summary.steps.append(file.step)
            summary.rates.append(sample.statistics.solve_rates())
            summary.lengths.append(sample.statistics.lengths)
            rates = [[group, *counts] for group, counts in sorted(sample.statistics.groups.items())]
            blocks.add_fitting(f"{prefix}groups{file.step}", rates, GROUP_BYTES // parts)
        summary.pages.append([name, file.step, file.is_validation, len(shown), sample.statistics.num_responses])
        for fact, value in itertools.chain.from_iterable(_facts(record, tokens).items() for record in shown):
            summary.index.setdefault(fact, []).append(value)
    return summary


def _add_tokens(
    blocks: Blocks, run: RunFiles, file: RolloutFile, prefix: str, pieces: Pieces, num_bytes: int
) -> set[int]:
    """Add the per-token values of a step; returns the digests of the responses that have some."""
    if file.is_validation:
        return set()
    values = read_token_values(run.directory, file.step, run.notes)
    shown = [shown_values(each, pieces) for each in values]
    count = blocks.add_fitting(f"{prefix}tokens{file.step}", shown, num_bytes)
    return {each.digest for each in values[:count]}


def _facts(record: JsonObject, with_tokens: set[int]) -> dict[str, object]:
    """Return the numbers by which the page filters and sorts a response."""
    return {
        "group": record.get("group"),
        "reward": record.get("reward"),
        "tokens": record.get("tokens"),
        "right": int(is_right(record)),
        "truncated": int(record.get("finish_reason") in TRUNCATED),
        "error": int(record.get("error") is not None),
        "tools": int(bool(record.get("tool_calls"))),
        "tokens_recorded": int(has_digest(record, with_tokens)),
    }
