"""What ends an episode from outside."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.schema import RolloutConfig


class EpisodeLimitError(Exception):
    """An episode has reached a limit, and ends with what there is of it. `reason`: length, turns, tool_calls or
    seconds."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class EpisodeLimits:
    """Units: tokens, calls, seconds. `response_tokens` of everything after a sequence's prompt, `context_tokens` of the
    prompt too; `turn_tokens` are sampled in one turn at most."""

    response_tokens: int
    context_tokens: int
    turn_tokens: int | None
    turns: int
    tool_calls_per_turn: int
    seconds: float | None

    @classmethod
    def of(cls, config: RolloutConfig, *, response_tokens: int, turns: int | None = None) -> EpisodeLimits:
        """`response_tokens` as the task has it; `turns` as the prompt's row has it, None: as the configuration."""
        return cls(
            response_tokens,
            config.max_prompt_tokens + config.max_response_tokens,
            config.max_turn_tokens,
            min(turns, config.max_turns) if turns is not None else config.max_turns,
            config.max_tool_calls_per_turn,
            config.max_episode_seconds,
        )

    def room(self, num_turns: int, num_prompt_tokens: int, num_tokens: int) -> int:
        """Tokens that may be sampled after so many turns, and `num_tokens` of a sequence.

        Raises: EpisodeLimitError where there is none.
        """
        if num_turns >= self.turns:
            raise EpisodeLimitError("turns", f"{num_turns} turns are over, rollout.max_turns is that")
        left = min(self.response_tokens - (num_tokens - num_prompt_tokens), self.context_tokens - num_tokens)
        if left <= 0:
            raise EpisodeLimitError("length", f"{num_tokens} tokens leave none to sample")
        return left if self.turn_tokens is None else min(left, self.turn_tokens)

    def check_calls(self, num_calls: int) -> None:
        """Raises: EpisodeLimitError where a turn may not call another tool."""
        if num_calls >= self.tool_calls_per_turn:
            text = f"{num_calls} calls in a turn, rollout.max_tool_calls_per_turn is that"
            raise EpisodeLimitError("tool_calls", text)
