"""Result of an episode: the token sequences to train on and the facts about the episode as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.types.chat import ChatMessage

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
