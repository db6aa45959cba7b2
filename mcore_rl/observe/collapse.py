"""Known signs that a run is about to collapse, or teaches nothing: each is said once, in words, with what to change.

The thresholds are rules of thumb; none of them stops a run.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

WINDOW = 20
"""Steps: over which a gradient's usual norm is known, and before which a critic may be bad."""

SETTLED = 5
"""Steps, after which shares of time are those of the run, not of its start."""


@dataclass(frozen=True)
class Sign:
    """A figure, when it is a sign, and what to say: `holds` and `text` see it now and as it was at first."""

    figure: str
    holds: Callable[[float, float], bool]
    text: str
    after_step: int = 0


SIGNS = (
    Sign(
        "actor/entropy",
        lambda now, first: now < 0.1 * first,
        "entropy fell from {first:.3g} to {now:.3g}: the policy stops exploring; raise algorithm.policy_loss.clip_high "
        "or algorithm.entropy_coefficient",
    ),
    Sign(
        "response_tokens/mean",
        lambda now, first: now < 0.3 * first,
        "responses shrank from {first:.0f} to {now:.0f} tokens: look at rollouts/ for a shortcut that is rewarded",
    ),
    Sign(
        "response_tokens/clipped_fraction",
        lambda now, first: now >= 0.5 and now >= first + 0.2,
        "{now:.0%} of the responses are cut off, {first:.0%} at first: raise rollout.max_response_tokens, or set "
        "reward.overlong.enable=true",
    ),
    Sign(
        "rollout/logp_diff_fresh_mean",
        lambda now, first: now > 0.05,
        "log-probabilities of engine and trainer differ by {now:.3f} nats on average: weights.verify_every=1 compares "
        "their weights, algorithm.correction corrects for the difference",
    ),
    Sign(
        "actor/clip_fraction",
        lambda now, first: now > 0.3,
        "{now:.0%} of the tokens are clipped: lower actor.optimizer.lr or the number of updates per rollout",
    ),
    Sign(
        "actor/ppo_kl",
        lambda now, first: abs(now) > 0.3,
        "the policy is {now:.2f} nats per token away from the one that generated: lower actor.optimizer.lr or the "
        "number of updates per rollout",
    ),
    Sign(
        "groups/without_signal",
        lambda now, first: now > 0.95,
        "in {now:.0%} of the groups all rewards are equal, which teaches nothing: look at groups/solved_all and "
        "groups/solved_none, and at the reward",
    ),
    Sign(
        "correction/effective_sample_fraction",
        lambda now, first: now < 0.3,
        "the importance weights are worth {now:.0%} of the samples: engine and trainer have drifted apart",
    ),
    Sign(
        "critic/explained_variance",
        lambda now, first: now < -0.5,
        "the critic explains {now:.2f} of the returns' variance, less than a constant would: change "
        "critic.optimizer.lr, or raise trainer.critic_warmup_steps",
        after_step=WINDOW,
    ),
    Sign(
        "time/trainer_idle_fraction",
        lambda now, first: now > 0.5,
        "the trainer ranks wait for responses {now:.0%} of the time: raise rollout.num_engines, "
        "rollout.max_concurrent_requests or rollout.max_staleness, or give ranks to the engines",
        after_step=SETTLED,
    ),
    Sign(
        "time/generator_idle_fraction",
        lambda now, first: now > 0.5,
        "engines have nothing to do {now:.0%} of the time: lower rollout.num_engines and give their devices to the "
        "trainer ranks, or raise rollout.max_staleness",
        after_step=SETTLED,
    ),
)
GRADIENT = "actor/grad_norm"
GRADIENT_TEXT = (
    "the gradient's norm is {now:.3g}, {times:.0f} times the median of the last steps: look at this step's rollouts; "
    "if it comes again, lower actor.optimizer.clip_grad"
)


@dataclass
class CollapseSigns:
    """Looks at every step's figures for `signs`, and at the gradient's norm; remembers the first figures, the recent
    norms, and what was said."""

    signs: Sequence[Sign] = SIGNS
    _first: dict[str, float] = field(default_factory=dict)
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _said: set[str] = field(default_factory=set)

    def look(self, step: int, values: Mapping[str, float | None]) -> list[str]:
        """Sentences about signs that this step shows for the first time."""
        sentences = []
        for sign in self.signs:
            now = values.get(sign.figure)
            if now is None:
                continue
            first = self._first.setdefault(sign.figure, now)
            if step > sign.after_step and sign.holds(now, first):
                sentences += self._say(sign.figure, f"step {step}: {sign.text.format(now=now, first=first)}")
        norm = values.get(GRADIENT)
        if norm is not None:
            usual = statistics.median(self._norms) if len(self._norms) == WINDOW else norm
            if norm > 20 * usual > 0:
                sentences += self._say(GRADIENT, f"step {step}: {GRADIENT_TEXT.format(now=norm, times=norm / usual)}")
            self._norms.append(norm)
        return sentences

    def _say(self, figure: str, sentence: str) -> list[str]:
        if figure in self._said:
            return []
        self._said.add(figure)
        return [sentence]
