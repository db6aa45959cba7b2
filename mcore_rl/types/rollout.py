"""Rollout requests and results, outcomes of episodes, and handles of data that stays on ranks or in the object store.

Remote calls return such handles, which are arguments of later calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.types.batch import Batch
from mcore_rl.types.chat import ChatMessage
from mcore_rl.types.data import BuffersRef, RolloutScalars, SamplingOptions, Spans
from mcore_rl.types.metrics import Metric
from mcore_rl.types.token_sets import TokenSets
from mcore_rl.types.vision import PromptImages

RolloutResult = tuple[BuffersRef, RolloutScalars]
"""Trajectories and scalars of one task."""


@dataclass(frozen=True)
class RolloutTask:
    """Prompt rows to be sampled on one engine. It yields G * samples_per_prompt responses, ordered by group.

    Shapes: prompt_rows, group_ids int64 [G].
    records: file that receives one JSON object per response, or None.
    journals: journals of engines that were lost while running the task, oldest first.
    responses: half-open range of the response numbers to generate; None: all.
    version: weight version at submission. Responses in `journals` that began with older weights are ignored: they
    belong to an earlier task with the same ids.
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
        # The numbers are stable over restarts, also if another engine continues a part of the task.
        return self.responses or (0, len(self.prompt_rows) * self.samples_per_prompt)

    @property
    def is_trained(self) -> bool:
        """True if the responses are used for training. Greedy responses to training prompts are only baselines."""
        return self.prompt_set == "train" and self.sampling.temperature > 0

    @property
    def num_responses(self) -> int:
        return len(range(*self.span))

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
    of one greedy response per kept group, if requested. `metrics` describes the collection.
    """

    chunks: tuple[BuffersRef, ...]
    scalars: tuple[RolloutScalars, ...]
    keep: tuple[np.ndarray, ...]
    greedy: tuple[RolloutScalars, ...] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)


NOT_SAMPLED = -1
"""Version of a token that was not sampled: a token of a tool or user message."""


@dataclass(frozen=True)
class Trajectory:
    """Token sequence of a prompt and its response. Tool and user messages may stand between sampled tokens.

    Shapes: prompt_ids int32 [P]; token_ids int32 [T], the first and the last of them sampled; logp float32 [T] (0 if
    not sampled); versions int32 [T] (NOT_SAMPLED if not sampled); trained uint8 [T], None: all;
    rewards float32 [T], rewards of turns at the last token of each turn, None without turns;
    routed_experts [P + T - 1, layers, k], see Completion;
    temperatures float32 [T], sampling temperature of each token (NaN if not sampled), None: not recorded.
    images: images in the prompt and in answers of tools;
    kept: sets of the T tokens (empty if not sampled), None: not recorded.
    role: name of the agent that sampled the tokens, for episodes with several; "": the only one.
    Units: logp in nats.
    """

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    logp: np.ndarray
    versions: np.ndarray
    trained: np.ndarray | None = None
    rewards: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    temperatures: np.ndarray | None = None
    images: PromptImages | None = None
    kept: TokenSets | None = None
    role: str = ""


def extra_of_turns(num_turns: int = 1, tool_rewards: Sequence[float] = ()) -> dict[str, object]:
    """Return the fields that every response adds to the graders' extra_info: number of turns and rewards of tools."""
    return {"num_turns": num_turns, "tool_rewards": list(tool_rewards)}


@dataclass(frozen=True)
class EpisodeOutcome:
    """Result of an episode. All its trajectories share its reward: `reward` if the episode sets one, else the graders'
    score of `text` (all text of the model); rewards of turns are added in both cases.

    `finish_reason`: stop; or the limit that ended the episode: length, turns, tool_calls, seconds; or error, with the
    reason in `error`; a failed episode is not trained on. `parts`: see Score. `seconds`: time spent in each state.
    `extra` is added to the graders' extra_info. `messages` is the conversation, if there is one.
    """

    trajectories: tuple[Trajectory, ...]
    text: str
    finish_reason: str
    reward: float | None = None
    accuracy: float | None = None
    parts: Mapping[str, float | str] = field(default_factory=dict)
    error: str | None = None
    traceback: str | None = None
    turns: int = 1
    tool_calls: int = 0
    tool_errors: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)
    messages: Sequence[ChatMessage] = ()
    taken_over: int = 0
    """Number of tokens sampled by engines that were lost."""

    @property
    def turn_rewards(self) -> float:
        """Sum of the rewards of all turns."""
        return float(sum(t.rewards.sum(dtype=np.float64) for t in self.trajectories if t.rewards is not None))


@dataclass(frozen=True)
class BatchHandle:
    """A batch on the actor's ranks, including the results computed for it so far. Ranks reject a call whose `key` is
    not the key of the batch that they hold. `metrics` accumulates the metrics of the passes.

    `is_sent` is false until the first call that needs the batch on the ranks; this call sends it.
    `entropy_coefficient` replaces algorithm.entropy_coefficient in the updates, unless it is None.
    """

    batch: Batch
    key: int
    is_sent: bool = False
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    entropy_coefficient: float | None = None


@dataclass(frozen=True)
class TokenRefs:
    """References to TokenColumns in the object store, one per data-parallel rank of the producing group. `key`
    identifies the batch on the ranks of that group."""

    columns: tuple[object, ...]
    key: int

    def overlapping(self, dp_rank: int, num_dp_ranks: int) -> tuple[object, ...]:
        """Return the columns with samples of one data-parallel rank of another group. One group's number of ranks must
        divide the other's."""
        return tuple(self.columns[part] for part in matching(dp_rank, num_dp_ranks, len(self.columns)))


@dataclass(frozen=True)
class ScoreRefs:
    """References to ScoreColumns in the object store, by data-parallel rank of the actor."""

    by_rank: tuple[tuple[object, ...], ...]


def matching(dp_rank: int, num_dp_ranks: int, others: int) -> range:
    """Return the ranks of a group of `others` ranks that share samples with `dp_rank`. The larger group is divided into
    runs of equal length."""
    # A rank of the smaller group shares its samples with a run of consecutive ranks of the larger group.
    if others >= num_dp_ranks:
        run = others // num_dp_ranks
        return range(dp_rank * run, (dp_rank + 1) * run)
    first = dp_rank * others // num_dp_ranks
    return range(first, first + 1)
