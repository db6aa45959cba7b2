"""Warnings about signs of collapse or missing learning signal, with remedies for the run's configuration.

Thresholds are heuristics and never stop a run. Remedies never name an option that is already set or has no effect.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.models import ActorConfig, RewardModelConfig
from mcore_rl.config.reward import NO_RULE, JudgeConfig, RewardConfig
from mcore_rl.config.rules.judge import uses_judge
from mcore_rl.config.rules.models import uses_reward_model
from mcore_rl.config.schema import Config, RolloutConfig, TrainerConfig

WINDOW = 20
"""Number of steps of the median gradient norm, and of initial steps without warnings about the critic."""

SETTLED = 5
"""Number of initial steps without warnings about idle fractions, which are not representative yet."""

UPPER_CLIPS = ("ppo_clip", "gspo", "cispo", "gmpo", "clip_cov", "decoupled_ppo")
"""Policy losses with algorithm.policy_loss.clip_high."""


@dataclass(frozen=True)
class Sign:
    """A condition on a metric, and its warning.

    figure: name of the metric.
    holds: function of the metric's current and first value; True: warn.
    text: template with the fields {now} (current value), {first} (first value) and {reward} (mean reward).
    after_step: last step that is not checked.
    """

    figure: str
    holds: Callable[[float, float], bool]
    text: str
    after_step: int = 0


GRADIENT = "actor/grad_norm"
GRADIENT_TEXT = (
    "the gradient's norm is {now:.3g}, {times:.0f} times the median of the last steps: look at this step's rollouts; "
    "if this happens again, lower actor.optimizer.clip_grad"
)


@dataclass
class CollapseSigns:
    """Checks the metrics of every step for `signs`, and the gradient norm for outliers. Reports each sign once per
    run."""

    signs: Sequence[Sign]
    _first: dict[str, float] = field(default_factory=dict)
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _reported: set[str] = field(default_factory=set)

    def check(self, step: int, values: Mapping[str, float | None]) -> list[str]:
        """Return warnings for signs that appear for the first time."""
        found = {}
        for sign in self.signs:
            now = values.get(sign.figure)
            if now is None:
                continue
            # `_first` is not saved: a resumed run compares with its first step after the resume.
            first = self._first.setdefault(sign.figure, now)
            if step > sign.after_step and sign.holds(now, first):
                found[sign.figure] = sign.text.format(now=now, first=first, reward=values.get("reward/mean") or 0.0)
        norm = values.get(GRADIENT)
        if norm is not None:
            # Until WINDOW norms are known, a norm is compared with itself, so nothing is reported.
            usual = statistics.median(self._norms) if len(self._norms) == WINDOW else norm
            # Steps without signal can have a norm of 0, and any norm would exceed a median of 0.
            if norm > 20 * usual > 0:
                found[GRADIENT] = GRADIENT_TEXT.format(now=norm, times=norm / usual)
            self._norms.append(norm)
        warnings = [f"step {step}: {text}" for figure, text in found.items() if figure not in self._reported]
        self._reported.update(found)
        return warnings


def signs_for(config: Config) -> list[Sign]:
    """Return all signs, with remedies that apply to `config`."""
    return [
        *_response_signs(config.algorithm, config.reward),
        *_distances(config.rollout, config.trainer, config.actor, config.weights.verify_every),
        *_rewards(_graders(config.reward, config.judge, config.reward_model)),
        *_idleness(config.rollout.num_engines),
    ]


def _response_signs(algorithm: AlgorithmConfig, reward: RewardConfig) -> list[Sign]:
    entropy = ["raise algorithm.entropy_coefficient"]
    if algorithm.policy_loss.name in UPPER_CLIPS:
        entropy.insert(0, "raise algorithm.policy_loss.clip_high")
    # Doubled braces below: the f-strings leave {now} and {first} for `CollapseSigns`.
    cut_off = ["raise rollout.max_response_tokens"]
    if not reward.punishes_overlong:
        cut_off.append("set reward.overlong.enable=true")
    return [
        Sign(
            "actor/entropy",
            lambda now, first: now < 0.1 * first,
            f"entropy fell from {{first:.3g}} to {{now:.3g}}: the policy stops exploring; {_either(entropy)}",
        ),
        Sign(
            "response_tokens/mean",
            lambda now, first: now < 0.3 * first,
            "responses shrank from {first:.0f} to {now:.0f} tokens: look at rollouts/ for a shortcut that is rewarded",
        ),
        Sign(
            "response_tokens/clipped_fraction",
            lambda now, first: now >= 0.5 and now >= first + 0.2,
            f"{{now:.0%}} of the responses are cut off, {{first:.0%}} at first: {_either(cut_off)}",
        ),
    ]


def _distances(rollout: RolloutConfig, trainer: TrainerConfig, actor: ActorConfig, verify_every: int) -> list[Sign]:
    """Return signs that the policies of engine and trainer differ, or that an update moves the policy too far."""
    slower = ["lower actor.optimizer.lr"]
    if trainer.prompts_per_step // trainer.prompts_per_update * trainer.update_epochs > 1:
        slower.append("lower the number of updates per rollout")
    if rollout.max_staleness > 0:
        slower.append("lower rollout.max_staleness")
    # Ways to find a systematic difference between engine and trainer.
    ways = ["look at rollout/logp_diff_max, and at config.json for a field that only one of them reads"]
    if verify_every != 1:
        ways.append("set weights.verify_every=1, which compares their weights")
    if rollout.max_logp_gap is None:
        ways.append("set rollout.max_logp_gap=auto, which compares them before the first step")
    if actor.fp8 != "none":
        ways.append(f"set actor.fp8=none instead of {actor.fp8}")
    if actor.moe.router_replay != "engine":
        ways.append("for a model with experts, set actor.moe.router_replay=engine")
    return [
        Sign(
            "rollout/logp_diff_fresh_mean",
            lambda now, first: now > 0.05,
            "log-probabilities of engine and trainer differ by {now:.3f} nats on average on tokens of the current "
            f"weights. No correction removes a systematic difference: {_either(ways)}",
        ),
        Sign(
            "actor/clip_fraction",
            lambda now, first: now > 0.3,
            f"{{now:.0%}} of the tokens are clipped: {_either(slower)}",
        ),
        Sign(
            "actor/ppo_kl",
            lambda now, first: abs(now) > 0.3,
            f"the policy is {{now:.2f}} nats per token away from the policy that generated: {_either(slower)}",
        ),
        Sign(
            "correction/effective_sample_fraction",
            lambda now, first: now < 0.3,
            "the effective sample size is {now:.0%} of the samples: engine and trainer have drifted apart",
        ),
    ]


def _rewards(graders: str) -> list[Sign]:
    return [
        Sign(
            "groups/without_signal",
            lambda now, first: now > 0.95,
            "in {now:.0%} of the groups all rewards are equal, so they do not train: look at groups/solved_all and "
            "groups/solved_none, and at the reward",
        ),
        Sign(
            "groups/all_equal",
            lambda now, first: now == 1,
            f"all scores of the step are equal (mean reward {{reward:g}}): {graders} cannot tell responses "
            "apart. Probable causes: it catches its own errors and returns a constant, it looks for a form of answer "
            "that the prompts do not ask for, or data.answer_key names another column than it compares with. Grade a "
            "line of rollouts/ by hand",
        ),
        Sign(
            "critic/explained_variance",
            lambda now, first: now < -0.5,
            "the critic explains {now:.2f} of the returns' variance, less than a constant would: change "
            "critic.optimizer.lr, or raise trainer.critic_warmup_steps",
            after_step=WINDOW,
        ),
    ]


def _idleness(num_engines: int) -> list[Sign]:
    faster = ["raise rollout.num_engines", "raise rollout.max_concurrent_requests", "raise rollout.max_staleness"]
    fewer = ["lower rollout.num_engines and give their devices to the trainer ranks"]
    if num_engines == 1:
        fewer = ["give the trainer more ranks"]
    return [
        Sign(
            "time/trainer_idle_fraction",
            lambda now, first: now > 0.5,
            "the trainer ranks wait for responses {now:.0%} of the time: "
            + _either([*faster, "give ranks to the engines"]),
            after_step=SETTLED,
        ),
        Sign(
            "time/generator_idle_fraction",
            lambda now, first: now > 0.5,
            "engines have nothing to do {now:.0%} of the time: " + _either([*fewer, "raise rollout.max_staleness"]),
            after_step=SETTLED,
        ),
    ]


def _graders(reward: RewardConfig, judge: JudgeConfig, model: RewardModelConfig) -> str:
    """Return the names of all graders as text, joined by `and`."""
    named = [] if reward.function == NO_RULE and not reward.weighted else [reward.chosen]
    if uses_judge(judge):
        named.append("judge")
    if uses_reward_model(model):
        named.append("reward_model")
    return " and ".join(named) or reward.chosen


def _either(remedies: Sequence[str]) -> str:
    *others, last = remedies
    return f"{', '.join(others)}, or {last}" if others else last
