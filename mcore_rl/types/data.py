"""Frozen values that packages exchange: numpy arrays and plain Python types, with documented shapes.

Shape letters: B responses, S tokens of prompt plus response, T response tokens, G groups (one per sampled prompt).

Flat layout, example of two trajectories with prompts of 3 and 2 tokens and responses of 2 and 4 tokens:

    tokens            p p p r r | p p r r r r
    token_offsets     0           5           11
    prompt_tokens     3, 2
    logp_rollout            x x |     x x x x        (response tokens only)
    response_offsets  0           2           6
    trained                 1 1 |     1 0 0 1        (0: token of a tool or user message)
    routed_experts    x x x x . | x x x x x .        (rows of layers x k; 0 for the last token, which no pass reads)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType, TypedDict

import numpy as np

from mcore_rl.types.chat import ChatMessage, ToolSchema
from mcore_rl.types.json import JsonValue
from mcore_rl.types.json_format import JsonFormat
from mcore_rl.types.token_sets import TokenSets
from mcore_rl.types.vision import ImageSource, PromptImages


class SamplingOverrides(TypedDict, total=False):
    """Values of SamplingOptions that a row or a call of session.generate sets."""

    max_response_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    # A list, because the value comes from JSON; SamplingOptions has a tuple.
    stop: list[str]


@dataclass(frozen=True)
class Prompt:
    """One tokenized row of a prompt set.

    `messages` are the chat messages that `text` was rendered from (a plain string becomes one user message); they stay
    complete if the text is truncated. `sampling` overrides SamplingOptions for this row, `max_turns` overrides the
    run's limit, `tools` are the OpenAI schemas offered for this row; None: the run's settings apply.
    `images`: encoded images, in the order of their places in the prompt.

    Shapes: token_ids int32 [P], with one placeholder token per feature of an image; `text` has one per image;
    hint_ids int32 [H], the prompt with the row's hint (data.hint_key), empty for a row without a hint; None: not read.
    """

    row: int
    token_ids: np.ndarray
    text: str
    data_source: str
    ground_truth: JsonValue
    extra_info: dict[str, object] = field(default_factory=dict)
    messages: list[ChatMessage] = field(default_factory=list)
    sampling: SamplingOverrides | None = None
    max_turns: int | None = None
    tools: list[ToolSchema] | None = None
    images: tuple[ImageSource, ...] = ()
    hint_ids: np.ndarray | None = None


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling parameters. temperature 0 is greedy. A response ends with the token that completes one of the `stop`
    strings. `repetition_penalty` is neutral for trained responses. Truncation (top_p, top_k, min_p) is neutral for
    them, too, unless `keep_mask` is set: completions then contain the set that each token was sampled from.

    format: tokens that would leave the format have no probability, before truncation; None: any text. Trained responses
    have a format only with `keep_mask`."""

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    keep_mask: bool = False
    format: JsonFormat | None = None

    @property
    def keeps_sets(self) -> bool:
        """True if sets are recorded: a greedy token has no distribution."""
        return self.keep_mask and self.temperature > 0


Spans = tuple[tuple[int, ...], ...]
"""Version spans of a response, in order: (version, first token, token after the last)."""


@dataclass(frozen=True)
class GenerationRequest:
    """One response to generate. Its own seed makes the run repeatable.

    `partial` is the aborted response to continue. A response that has sampled `tokens_per_version` tokens under one
    weight version pauses so that others can run; None: no limit. `spans` prescribes the weight version of each token,
    and the request waits for these versions; (): the current weights. `images`: images in the tokens, of the row
    and of answers of tools.
    """

    request_id: str
    token_ids: np.ndarray
    seed: int
    sampling: SamplingOptions
    partial: Completion | None = None
    tokens_per_version: int | None = None
    spans: Spans = ()
    images: PromptImages | None = None


class Delta(NamedTuple):
    """Tokens that one engine step added to a response, sampled with the weights of `version`. Units: logp in nats.

    kept: runs of the sets that the tokens were sampled from, see TokenSets; None without SamplingOptions.keep_mask.
    """

    # A tuple, because one is created per token: a frozen dataclass takes three times as long.

    request_id: str
    token_ids: list[int]
    logp: list[float]
    version: int
    kept: Sequence[np.ndarray] | None = None


@dataclass(frozen=True)
class Completion:
    """Response to one request, including its `partial` part.

    finish_reason is "stop", "length" or "abort".
    Shapes: token_ids int32 [T]; logp float32 [T], after temperature and truncation; versions int32 [T], weight version
    of each token; routed_experts uint8 or int16 [S - 1, layers with experts, k], the engine's choice for every prompt
    and response token but the last, None if not recorded; temperatures float32 [T], sampling temperature of each token,
    None: the request's; kept, the sets that the T tokens were sampled from, None without SamplingOptions.keep_mask.
    Units: logp in nats.
    """

    request_id: str
    token_ids: np.ndarray
    logp: np.ndarray
    finish_reason: str
    versions: np.ndarray
    routed_experts: np.ndarray | None = None
    temperatures: np.ndarray | None = None
    kept: TokenSets | None = None

    def sampled_at(self, temperature: float) -> np.ndarray:
        """Return the sampling temperature of each token, float32 [T]; `temperature` is the request's."""
        if self.temperatures is not None:
            return self.temperatures
        return np.full(len(self.token_ids), temperature, np.float32)


@dataclass(frozen=True)
class Score:
    """A grader's result for one response.

    `accuracy` is used by validation and dynamic sampling. `error` (one line) is set if the grader raised, hung or died;
    reward and accuracy are 0 then. `traceback` is the position of the exception or of the timeout; with many errors
    only some have one. `parts` are additional finite numbers and texts; their names must not be names of metrics or
    record fields.
    """

    reward: float
    accuracy: float
    error: str | None = None
    traceback: str | None = None
    parts: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrajectoryBuffers:
    """Trajectories of one rollout call as flat arrays (see the example above), held by the process that produced them.

    Shapes: tokens int32 [sum S]; token_offsets int64 [B + 1]; prompt_tokens int32 [B]; logp_rollout float32, versions
    int32, trained uint8: [sum T]; response_offsets int64 [B + 1];
    routed_experts uint8 or int16 [sum S, layers with experts, k], None if not recorded;
    turn_rewards float32 [sum T], part of the response's reward, at the last token of each turn, None without turns;
    temperatures float32 [sum T], sampling temperature of each token, or a scalar [] if it is the same for all. NaN, or
    None for all tokens: not recorded (files of earlier versions, target texts); the run's temperature applies;
    image_rows int32 [B], index in `images` of each trajectory's images, -1 for one without images; None: no images;
    kept_words int32 [W], kept_offsets int64 [sum T + 1]: sets that response tokens were sampled from (TokenSets), None
    if not recorded;
    hint_tokens int32 [sum H], hint_offsets int64 [B + 1]: prompts with hints, after which teachers score the responses
    (data.hint_key); empty for a trajectory without a hint; None: no trajectory has one.
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
    images: tuple[PromptImages, ...] = ()
    image_rows: np.ndarray | None = None
    kept_words: np.ndarray | None = None
    kept_offsets: np.ndarray | None = None
    hint_tokens: np.ndarray | None = None
    hint_offsets: np.ndarray | None = None

    @property
    def kept(self) -> TokenSets | None:
        """Sets of all response tokens; None if not recorded."""
        if self.kept_words is None or self.kept_offsets is None:
            return None
        return TokenSets(self.kept_words, self.kept_offsets)


# A Ray ObjectRef in a run; this package does not import Ray.
BuffersRef = NewType("BuffersRef", object)
"""Reference to TrajectoryBuffers; they exist as long as the reference does."""


@dataclass(frozen=True)
class RolloutScalars:
    """Results of a rollout call that reach the driver: scalars per response, no tokens.

    Shapes: every array [B]. group_ids, prompt_rows int64; total_tokens, response_tokens, trained_tokens int32; rewards,
    accuracies float32; clipped uint8 (1: the response reached its token limit); versions int32 [B, 2], weight versions
    of the first and the last token.
    errors: (response index, message) of each failed grading; `traceback` belongs to the first error that has one.
    scores: {reward model: float32 [B]}, already included in the rewards.
    parts: {name: float64 [B]}, additional numbers of graders; NaN if a response has none.
    tokens_taken_over: number of tokens sampled by lost engines and continued by others.
    episodes: int64 [B], row of the first response of the same episode (they share its reward); None: one response each.
    roles: text [B], see Trajectory.role; other_rewards: float32 [B], the part of the reward that turns of other roles
    of the episode have. None: no role has a name.
    episode_metrics: {metric name: float64 [B]}, one number per episode.
    digests: uint32 [B], checksums of the tokens, to detect whether a response was generated identically again.
    version_tokens: pairs (weight version, number of trained tokens sampled with it); a version may occur several times.
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
    episode_metrics: Mapping[str, np.ndarray] = field(default_factory=dict)
    digests: np.ndarray | None = None
    version_tokens: tuple[tuple[int, int], ...] = ()
    roles: np.ndarray | None = None
    other_rewards: np.ndarray | None = None


@dataclass(frozen=True)
class Grades:
    """Grading results for the responses of a task; fields have the meaning of RolloutScalars."""

    rewards: np.ndarray
    accuracies: np.ndarray
    errors: tuple[tuple[int, str], ...] = ()
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    traceback: str | None = None


@dataclass(frozen=True)
class Span:
    """Named interval for the timeline. Units: start, end in seconds of the Unix clock."""

    name: str
    start: float
    end: float
    process: str
