"""What is asked of engines, and what a step has of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.types.data import BuffersRef, RolloutScalars, SamplingOptions, Spans
from mcore_rl.types.metrics import Metric

RolloutResult = tuple[BuffersRef, RolloutScalars]
"""Of one task."""


@dataclass(frozen=True)
class RolloutTask:
    """Prompt rows for one engine.

    Shapes: prompt_rows, group_ids int64 [G]; G * samples_per_prompt responses come back, group by group.
    `records` names the file that receives one JSON object per response, or is None. `journals` are those of engines
    that were lost with the task, the last one last. `responses`: only these are wanted, from the first number on and
    before the second; None: all. `version` of the weights when it was submitted: what lost engines drew with earlier
    ones is of another task with the same ids. `tokens_per_version`: of its requests.
    `spans`: of each response of the task, or ().
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
        """Numbers of the first response that is wanted, and of the first after them."""
        return self.responses or (0, len(self.prompt_rows) * self.samples_per_prompt)

    @property
    def is_trained(self) -> bool:
        """Whether its responses are trained on; greedy ones of the training set are baselines only."""
        return self.prompt_set == "train" and self.sampling.temperature > 0

    @property
    def num_responses(self) -> int:
        first, last = self.span
        return last - first

    @property
    def request_ids(self) -> list[str]:
        return [self.request_id(response) for response in range(*self.span)]

    def request_id(self, response: int) -> str:
        """Of one response, by its number; a greedy one to a group that others are sampled of is another one."""
        group, sample = divmod(response, self.samples_per_prompt)
        beside = self.prompt_set == "train" and self.sampling.temperature == 0
        return f"{self.prompt_set}{'_greedy' if beside else ''}.{self.group_ids[group]}.{sample}"


@dataclass(frozen=True)
class Groups:
    """What a step generated and what of it is trained on.

    `keep[i]` holds the kept response indices of chunk i, whole groups in order. `greedy` are the scalars of one greedy
    response to the prompt of every kept group, where they were asked for. `figures`: of how they were collected.
    """

    chunks: tuple[BuffersRef, ...]
    scalars: tuple[RolloutScalars, ...]
    keep: tuple[np.ndarray, ...]
    groups_drawn: int
    groups_dropped: int
    batches: int
    seconds_generating: float = 0.0
    seconds_grading: float = 0.0
    greedy: tuple[RolloutScalars, ...] = ()
    figures: Mapping[str, Metric] = field(default_factory=dict)
