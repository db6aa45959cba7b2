"""Limits that end an episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from mcore_rl.config.schema import RolloutConfig


class EpisodeLimitError(Exception):
    """An episode has reached a limit and ends with its current trajectory. `reason`: length, turns, tool_calls or
    seconds."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass
class EpisodeLimits:
    """Limits of an episode: the configured ones, `response_tokens` of a sequence after its prompt, and `turns`."""

    config: RolloutConfig
    response_tokens: int
    turns: int
    reached: str | None = None
    """Reason of the last EpisodeLimitError, since an episode may catch the error and return a result."""

    @property
    def context_tokens(self) -> int:
        """Tokens of a sequence including its prompt."""
        return self.config.max_prompt_tokens + self.config.max_response_tokens

    def room(self, num_turns: int, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return the number of tokens that may be sampled after `num_turns` turns, in a sequence of `num_tokens`
        tokens.

        Raises: EpisodeLimitError if there is no room.
        """
        if num_turns >= self.turns:
            self._end("turns", f"the limit of {num_turns} turns (rollout.max_turns) is reached")
        # The task limits the response only; the context includes the prompt.
        left = min(self.response_tokens - (num_tokens - num_prompt_tokens), self.context_tokens - num_tokens)
        if left <= 0:
            self._end("length", f"a sequence of {num_tokens} tokens leaves no room for another turn")
        return left if self.config.max_turn_tokens is None else min(left, self.config.max_turn_tokens)

    def check_calls(self, num_calls: int) -> None:
        """Raise EpisodeLimitError if the turn may not call another tool."""
        if num_calls >= self.config.max_tool_calls_per_turn:
            key = "rollout.max_tool_calls_per_turn"
            self._end("tool_calls", f"the limit of {num_calls} calls per turn ({key}) is reached")

    def _end(self, reason: str, text: str) -> NoReturn:
        self.reached = reason
        raise EpisodeLimitError(reason, text)
