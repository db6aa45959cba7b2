"""DAPO's soft penalty for responses near their token limit.

    R(n) = 0                                      n <= L - buffer
         = penalty * ((L - buffer) - n) / buffer  up to L
         = -penalty                               beyond

n is the response length and L its limit, in tokens. The penalty changes the reward, never the accuracy.
Source: DAPO, arXiv 2503.14476, equation 13 (where penalty is 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.reward import RewardConfig
from mcore_rl.errors import ConfigError


@dataclass(frozen=True)
class SoftOverlong:
    """Penalty as a function of response length."""

    max_response_tokens: int
    buffer_tokens: int
    penalty: float

    @classmethod
    def of(cls, reward: RewardConfig, max_response_tokens: int) -> SoftOverlong | None:
        """Build the penalty that reward.overlong configures; None if it is off.

        Raises: ConfigError for a buffer or penalty out of range.
        """
        if not reward.punishes_overlong:
            return None
        config = reward.overlong
        if not 0 < config.buffer_tokens <= max_response_tokens:
            raise ConfigError(
                f"reward.overlong.buffer_tokens={config.buffer_tokens} must be between 1 and "
                f"rollout.max_response_tokens={max_response_tokens}"
            )
        if not config.penalty >= 0:
            raise ConfigError(f"reward.overlong.penalty={config.penalty} must not be negative")
        return cls(max_response_tokens, config.buffer_tokens, config.penalty)

    def reward(self, response_tokens: int) -> float:
        """Return the reward's change, between -penalty and 0."""
        over = response_tokens - (self.max_response_tokens - self.buffer_tokens)
        return -self.penalty * min(max(over, 0) / self.buffer_tokens, 1.0) if over > 0 else 0.0
