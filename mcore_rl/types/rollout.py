"""Rollout requests and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.types.data import BuffersRef, RolloutScalars, SamplingOptions, Spans
from mcore_rl.types.metrics import Metric

RolloutResult = tuple[BuffersRef, RolloutScalars]
"""Trajectories and scalars of one task."""


@dataclass(frozen=True)
class RolloutTask:
    """Prompt rows to be sampled on one engine. It yields G * samples_per_prompt responses, ordered by group.

    Shapes: prompt_rows, group_ids int64 [G].
    records: file that receives one JSON object per response, or None.
    journals: journals of engines that were lost while running the task, oldest first.
    responses: half-open range of the response numbers to generate; None: all.
    version: weight version at submission. Tokens that a lost engine sampled with older weights belong to an earlier
    task with the same ids.
    tokens_per_version, spans: see GenerationRequest; spans holds one entry per response, or ().
    """

    prompt_set: str
    prompt_rows: np.ndarray
    group_ids: np.ndarray
    samples_per_prompt: int
    sampling: SamplingOptions
    seed: int
    records: str | None = None
    journals: tuple[str, ...] = ()
    responses: tuple[int, int] | None = None
    version: int = 0
    tokens_per_version: int | None = None
    spans: tuple[Spans, ...] = ()

    @property
    def span(self) -> tuple[int, int]:
        """Half-open range of the response numbers to generate."""
        return self.responses or (0, len(self.prompt_rows) * self.samples_per_prompt)

    @property
    def is_trained(self) -> bool:
        """True if the responses are trained on. Greedy responses to training prompts are only baselines."""
        return self.prompt_set == "train" and self.sampling.temperature > 0

    @property
    def num_responses(self) -> int:
        first, last = self.span
        return last - first

    @property
    def request_ids(self) -> list[str]:
        return [self.request_id(response) for response in range(*self.span)]

    def request_id(self, response: int) -> str:
        """Return the id of one response, by its number. A greedy baseline has a different id than the sampled responses
        of its group."""
        # Ids must be stable over restarts: journals and seeds are looked up by them.
        group, sample = divmod(response, self.samples_per_prompt)
        is_baseline = self.prompt_set == "train" and self.sampling.temperature == 0
        return f"{self.prompt_set}{'_greedy' if is_baseline else ''}.{self.group_ids[group]}.{sample}"


@dataclass(frozen=True)
class Groups:
    """Groups generated in a step, and the selection that is trained.

    `keep[i]` holds the indices of the trained responses of chunk i, whole groups in order. `greedy` holds the scalars
    of one greedy response per kept group, if requested. `batches` counts the rounds of sampling that the step needed.
    `metrics` describes the collection.
    """

    chunks: tuple[BuffersRef, ...]
    scalars: tuple[RolloutScalars, ...]
    keep: tuple[np.ndarray, ...]
    groups_sampled: int
    groups_dropped: int
    batches: int
    seconds_generating: float = 0.0
    seconds_grading: float = 0.0
    greedy: tuple[RolloutScalars, ...] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)
