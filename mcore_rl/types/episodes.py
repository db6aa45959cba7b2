"""What an episode leaves: the token sequences that are trained on, and what is known of it as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NOT_SAMPLED = -1
"""Version of a token that no weights drew: of a tool's answer, or a user's."""


@dataclass(frozen=True)
class Trajectory:
    """A token sequence: a prompt and its response, in which what others said may stand between sampled tokens.

    Shapes: prompt_ids int32 [P]; token_ids int32, logp float32 (0 where not sampled), versions int32 (NOT_SAMPLED
    there): [T], the first and the last of them sampled; trained uint8 [T], None: all; rewards float32 [T], of turns, at
    the last token of each, None: there are no turns; routed_experts as Completion's, [P + T - 1, layers, k];
    temperatures float32 [T], the sampling temperature of each token (NaN where not sampled), None: not recorded.
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


def extra_of_turns(num_turns: int = 1, tool_rewards: Sequence[float] = ()) -> dict[str, Any]:
    """Return the fields that every response adds to the extra_info of graders: its turns and its tools' rewards."""
    return {"num_turns": num_turns, "tool_rewards": list(tool_rewards)}


@dataclass(frozen=True)
class EpisodeOutcome:
    """How an episode ended. Its trajectories share its reward: what graders say of `text`, all that the model said, or
    `reward` where the episode has its own, and the rewards of turns in either case.

    `finish_reason`: stop, or the limit that ended it: length, turns, tool_calls, seconds; error where it failed, and
    then `error` says why and nothing of it is trained. `parts` as Score's. `seconds` by the state in which they passed.
    `extra` joins the extra_info that graders see; `messages` is the conversation, where there is one.
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
    extra: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    taken_over: int = 0
    """Tokens that lost engines had drawn."""

    @property
    def turn_rewards(self) -> float:
        """The sum of all turns'."""
        return float(sum(t.rewards.sum(dtype=np.float64) for t in self.trajectories if t.rewards is not None))
