"""The values that travel between rooms: frozen, numpy only, shapes documented.

Shape letters: B responses, S tokens of prompt plus response, T response tokens, G groups (one per drawn prompt).

Flat layout, worked example for two trajectories, prompts of 3 and 2 tokens, responses of 2 and 4 tokens:

    tokens            p p p r r | p p r r r r
    token_offsets     0           5           11
    prompt_tokens     3, 2
    logp_rollout            x x |     x x x x        (response tokens only)
    response_offsets  0           2           6
    trained                 1 1 |     1 0 0 1        (0: a tool's answer, or a user's)
    routed_experts    x x x x . | x x x x x .        (a row of layers x k each; nothing computes the last token: 0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One row of a prompt set, tokenised. `messages` are the chat messages that `text` renders (a plain string is one
    of the user's), whole even where the text was truncated. `sampling` are keys of SamplingOptions that hold for this
    row alone, `max_turns` is a limit of its own, `tools` are the OpenAI schemas that it offers; None where the run's
    hold.

    Shapes: token_ids int32 [P].
    """

    row: int
    token_ids: np.ndarray
    text: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    sampling: Mapping[str, Any] | None = None
    max_turns: int | None = None
    tools: list[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class SamplingOptions:
    """How an engine draws tokens. temperature 0 is greedy. A response ends with the token that completes one of the
    texts in `stop`."""

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()


Spans = tuple[tuple[int, ...], ...]
"""Of a response: (version, first token, token after the last), one after the other."""


@dataclass(frozen=True)
class GenerationRequest:
    """One response to generate: token ids in, a seed of its own, so that a run can be repeated. `partial` is what there
    is of the response already, of an engine that aborted it: it goes on from there. A response that has drawn
    `tokens_per_version` tokens under one version of the weights lets others go first; None: no such limit. `spans`:
    the versions that are to draw it; it waits for each. (): whatever weights there are."""

    request_id: str
    token_ids: np.ndarray
    seed: int
    sampling: SamplingOptions
    partial: Completion | None = None
    tokens_per_version: int | None = None
    spans: Spans = ()


@dataclass(frozen=True)
class Delta:
    """What a step of an engine has added to a response. Units: logp in nats; `version` is of the weights that drew the
    tokens."""

    request_id: str
    token_ids: list[int]
    logp: list[float]
    version: int


@dataclass(frozen=True)
class Completion:
    """What an engine returned for one request, and what there was of its response before.

    Shapes: token_ids int32 [T]; logp float32 [T], log-probabilities after temperature and truncation; versions int32
    [T], of the weights that drew each token; routed_experts uint8 or int16 [S - 1, layers with experts, k], what the
    engine chose for every token of prompt and response but the last, where it was asked to say.
    Units: logp in nats.
    finish_reason is "stop", "length" or "abort".
    temperatures float32 [T]: the sampling temperature of each token; None: all have the request's.
    """

    request_id: str
    token_ids: np.ndarray
    logp: np.ndarray
    finish_reason: str
    versions: np.ndarray
    routed_experts: np.ndarray | None = None
    temperatures: np.ndarray | None = None

    def sampled_at(self, temperature: float) -> np.ndarray:
        """Sampling temperature of each token, float32 [T]; `temperature` is the request's."""
        if self.temperatures is not None:
            return self.temperatures
        return np.full(len(self.token_ids), temperature, np.float32)


@dataclass(frozen=True)
class Score:
    """A grader's verdict on one response. `accuracy` feeds validation and dynamic sampling; `error`, one line, is set
    when the grader raised, hung or died, and then reward and accuracy are 0. `traceback` is where it raised, or was
    when its time was over; of many errors some have none. `parts` are what else the grader says, by names that no
    metric and no field of a record has: numbers, all finite, and texts."""

    reward: float
    accuracy: float
    error: str | None = None
    traceback: str | None = None
    parts: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrajectoryBuffers:
    """Trajectories of one rollout call as flat arrays (see the module's example); kept by the process that made it.

    Shapes: tokens int32 [sum S]; token_offsets int64 [B + 1]; prompt_tokens int32 [B];
    logp_rollout float32, versions int32, trained uint8: [sum T]; response_offsets int64 [B + 1];
    routed_experts uint8 or int16 [sum S, layers with experts, k], None where the engine was not asked for them;
    turn_rewards float32 [sum T], a part of the responses' rewards, at the last token of each turn, None where there are
    no turns;
    temperatures float32 [sum T], the sampling temperature of each token, or a scalar [] if all tokens have the same.
    NaN, and None for all tokens: not recorded (files of earlier versions, target texts), which means the run's.
    """

    tokens: np.ndarray
    token_offsets: np.ndarray
    prompt_tokens: np.ndarray
    response_offsets: np.ndarray
    logp_rollout: np.ndarray
    versions: np.ndarray
    trained: np.ndarray
    routed_experts: np.ndarray | None = None
    turn_rewards: np.ndarray | None = None
    temperatures: np.ndarray | None = None


BuffersRef = NewType("BuffersRef", object)
"""Refers to TrajectoryBuffers, which are kept as long as it is."""


@dataclass(frozen=True)
class RolloutScalars:
    """All that the driver learns of a rollout call: one scalar per response, no tokens.

    Shapes: every array [B]. group_ids int64; prompt_rows int64; total_tokens, response_tokens, trained_tokens
    int32; rewards, accuracies float32; clipped uint8 (1 where the response hit its token limit); versions int32 [B, 2],
    of the weights that drew the first token and the last one.
    errors holds (index, message) of graders that failed, `traceback` where the first of them that knows it did.
    `scores` are those of reward models, float32 [B] by the model's name, already in the rewards. `parts` are the
    numbers that graders gave beside their scores, float64 [B] by name, NaN for a response that has none of that name.
    `tokens_taken_over`: how many were drawn by engines that were lost. `episodes` int64 [B]: for each response the row
    of the first one of its episode, all of which have its reward; None: every response is an episode. `figures` are
    numbers of episodes, float64 [B] by the name of the metric. `digests` uint32 [B] of the tokens, by which it
    is known whether somebody has made the same again. `version_tokens`: versions of the weights, and how many of all
    trained tokens each has drawn; a version may come several times.
    """

    group_ids: np.ndarray
    prompt_rows: np.ndarray
    total_tokens: np.ndarray
    response_tokens: np.ndarray
    trained_tokens: np.ndarray
    rewards: np.ndarray
    accuracies: np.ndarray
    clipped: np.ndarray
    versions: np.ndarray
    errors: tuple[tuple[int, str], ...] = ()
    seconds_generating: float = 0.0
    seconds_grading: float = 0.0
    scores: Mapping[str, np.ndarray] = field(default_factory=dict)
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    traceback: str | None = None
    tokens_taken_over: int = 0
    episodes: np.ndarray | None = None
    figures: Mapping[str, np.ndarray] = field(default_factory=dict)
    digests: np.ndarray | None = None
    version_tokens: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Grades:
    """What graders say of the responses of a task; all of it as RolloutScalars has it."""

    rewards: np.ndarray
    accuracies: np.ndarray
    errors: tuple[tuple[int, str], ...] = ()
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    traceback: str | None = None


@dataclass(frozen=True)
class Batch:
    """The driver's view of one training step: references and scalars.

    `chunks` refer to TrajectoryBuffers; response b is row `rows[b]` of chunk
    `chunk_ids[b]`. `updates[u]` and `dp_ranks` say in which optimizer update, and on which data-parallel rank,
    a response is trained; both are fixed here so that what passes find of it can stay where it was computed.

    Shapes: chunk_ids, rows, dp_ranks, total_tokens, trained_tokens int32 [B]; group_ids int64 [B];
    rewards, advantages, loss_weights float32 [B]; updates: tuple of int64 index arrays.
    `version` is the one of the weights that the first update starts from: no token was sampled with a newer one.
    loss_weights[b] multiplies every trained token of response b; with it the plain sum over all tokens of all
    ranks is the aggregated loss, so no rank ever needs another's count.
    """

    chunks: tuple[BuffersRef, ...]
    chunk_ids: np.ndarray
    rows: np.ndarray
    group_ids: np.ndarray
    total_tokens: np.ndarray
    trained_tokens: np.ndarray
    rewards: np.ndarray
    advantages: np.ndarray
    loss_weights: np.ndarray
    dp_ranks: np.ndarray
    updates: tuple[np.ndarray, ...]
    version: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def shares(self, num_dp_ranks: int, places: np.ndarray) -> list[RankShares]:
        """What each data-parallel rank trains. `places` int32 [B]: where each response is among the trajectories that
        its rank gets, all in one chunk."""
        samples = np.concatenate([*self.updates, np.empty(0, np.int64)])
        update_of = np.repeat(np.arange(len(self.updates)), [len(update) for update in self.updates])
        order = np.argsort(self.dp_ranks[samples], kind="stable")
        samples, cells = samples[order], self.dp_ranks[samples[order]] * len(self.updates) + update_of[order]
        table = np.empty(len(samples), SHARE_COLUMNS)
        for name in ("total_tokens", "rewards", "advantages", "loss_weights"):
            table[name] = getattr(self, name)[samples]
        table["samples"], table["rows"] = samples, places[samples]
        table["origins"] = np.stack([self.chunk_ids[samples], self.rows[samples]], axis=1)
        counts = np.bincount(cells, minlength=num_dp_ranks * len(self.updates)).reshape(num_dp_ranks, -1)
        tables = np.split(table, np.cumsum(counts.sum(axis=1))[:-1])
        return [RankShares(*pair, self.version) for pair in zip(tables, counts, strict=True)]


@dataclass(frozen=True)
class RankShare:
    """What one data-parallel rank receives of a Batch for one update.

    Response b is row `rows[b]` of chunk `chunk_ids[b]` of the trajectories that come with the share; `origins[b]` are
    rollout call and row where it came from, for messages.

    Shapes: samples int64 [b] indices into the Batch (they name samples in errors and in what passes find);
    chunk_ids, rows int32 [b]; origins int32 [b, 2]; rewards, advantages, loss_weights float32 [b]. `version` is
    the batch's.
    """

    samples: np.ndarray
    chunk_ids: np.ndarray
    rows: np.ndarray
    origins: np.ndarray
    total_tokens: np.ndarray
    rewards: np.ndarray
    advantages: np.ndarray
    loss_weights: np.ndarray
    version: int = 0


SHARE_COLUMNS = np.dtype(
    [
        ("samples", np.int64),
        ("rows", np.int32),
        ("origins", np.int32, 2),
        ("total_tokens", np.int32),
        ("rewards", np.float32),
        ("advantages", np.float32),
        ("loss_weights", np.float32),
    ]
)


@dataclass(frozen=True)
class RankShares:
    """What one data-parallel rank receives of a Batch, in one array however many updates there are.

    Shapes: table SHARE_COLUMNS [b], update after update, counts[u] rows of each; counts int64 [updates].
    """

    table: np.ndarray
    counts: np.ndarray
    version: int

    def by_update(self) -> list[RankShare]:
        """An empty one where the rank has no response in an update."""
        names = SHARE_COLUMNS.names or ()
        return [
            RankShare(
                **{name: np.ascontiguousarray(part[name]) for name in names},
                chunk_ids=np.zeros(len(part), np.int32),
                version=self.version,
            )
            for part in np.split(self.table, np.cumsum(self.counts)[:-1])
        ]


@dataclass(frozen=True)
class TokenColumn:
    """A number for every trained token of some samples, such as a critic's value; lives in the object store.

    Shapes: samples int64 [b] indices into the Batch; offsets int64 [b + 1]; values float32 [offsets[-1]].
    """

    samples: np.ndarray
    offsets: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, by_sample: Mapping[int, np.ndarray]) -> TokenColumn:
        """Shapes: [n] by sample."""
        offsets = np.zeros(len(by_sample) + 1, np.int64)
        np.cumsum([len(part) for part in by_sample.values()], out=offsets[1:])
        values = np.concatenate([np.empty(0, np.float32), *by_sample.values()]).astype(np.float32, copy=False)
        return cls(np.fromiter(by_sample, np.int64, len(by_sample)), offsets, values)

    def by_sample(self) -> dict[int, np.ndarray]:
        """Shapes: float32 [n] by sample."""
        parts = np.split(self.values, self.offsets[1:-1]) if len(self.samples) else []
        return dict(zip(self.samples.tolist(), parts, strict=True))


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint: its path within the checkpoint, its size, and the CRC-32 of its bytes."""

    name: str
    num_bytes: int
    crc32: int


@dataclass(frozen=True)
class SavedState:
    """What the ranks wrote of a checkpoint; `description` (layout, versions, tensors) is for JSON."""

    files: tuple[SavedFile, ...]
    description: dict[str, Any]


@dataclass(frozen=True)
class Span:
    """A named piece of work for the timeline. Units: start, end in seconds of the Unix clock."""

    name: str
    start: float
    end: float
    process: str
