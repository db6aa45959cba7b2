"""Entries about the policy: size of the updates, and agreement between engine and trainer."""

from __future__ import annotations

from mcore_rl.config.schema import Config
from mcore_rl.observe.guide.conditions import Above, Below, Fallen, Outlier, Outside
from mcore_rl.observe.guide.entries import MetricEntry, Remedy, Warned
from mcore_rl.observe.guide.loss_scale import loss_scale_entries

UPPER_CLIPS = ("ppo_clip", "gspo", "cispo", "gmpo", "clip_cov", "decoupled_ppo", "dppo_tv", "dppo_kl", "fipo")
"""Policy losses with algorithm.policy_loss.clip_high."""


def _has_upper_clip(config: Config) -> bool:
    return config.algorithm.policy_loss.name in UPPER_CLIPS


def _several_updates(config: Config) -> bool:
    trainer = config.trainer
    return trainer.prompts_per_step // trainer.prompts_per_update * trainer.update_epochs > 1


def _is_asynchronous(config: Config) -> bool:
    return config.rollout.max_staleness > 0


SLOWER = (
    Remedy("lower actor.optimizer.lr"),
    Remedy("lower the number of updates per rollout", _several_updates, "with several updates per step"),
    Remedy("lower rollout.max_staleness", _is_asynchronous, "in asynchronous runs"),
)
"""Remedies of updates that move the policy too far."""

DIFFERENCE = (
    Remedy("look at rollout/logp_diff_max, and at config.json for a field that only one of them reads"),
    Remedy(
        "set weights.verify_every=1, which compares their weights",
        lambda config: config.weights.verify_every != 1,
        "if it is not set yet",
    ),
    Remedy(
        "set rollout.max_logp_gap=auto, which compares them before the first step",
        lambda config: config.rollout.max_logp_gap is None,
        "if it is null",
    ),
    Remedy("set actor.fp8=none", lambda config: config.actor.fp8 != "none", "if the trainer uses FP8"),
    Remedy(
        "set rollout.quantization=none",
        lambda config: config.rollout.quantization != "none",
        "if the engines use quantised weights",
    ),
    Remedy(
        "for a model with experts, set actor.moe.router_replay=engine",
        lambda config: config.actor.moe.router_replay != "engine",
        "if it is not set yet",
    ),
)
"""Ways to find a systematic difference between engine and trainer."""

POLICY = (
    MetricEntry(
        "actor/entropy",
        "falls slowly, and stays well above 0",
        (
            Remedy(
                "raise algorithm.policy_loss.clip_high", _has_upper_clip, f"with the losses {', '.join(UPPER_CLIPS)}"
            ),
            Remedy("raise algorithm.entropy_coefficient"),
        ),
        Warned(Fallen(0.1), "entropy fell from {first:.3g} to {now:.3g}: the policy stops exploring; {remedies}"),
        "rises without limit: responses become random",
    ),
    MetricEntry(
        "actor/ppo_kl",
        "0 to 0.05 nats; about 0 with one update per step",
        SLOWER,
        Warned(Outside(0.3), "the policy is {now:.2f} nats per token away from the policy that generated: {remedies}"),
        "grows from step to step",
    ),
    MetricEntry(
        "actor/kl_reference",
        "grows slowly and levels off; only with KL terms",
        (
            Remedy("raise algorithm.kl.in_loss or algorithm.kl.in_reward"),
            Remedy("lower actor.optimizer.lr"),
        ),
        signs="jumps, or grows while val/accuracy falls",
    ),
    MetricEntry(
        "distillation/kl",
        "falls towards 0; only with teacher.in_advantage",
        (
            Remedy("lower actor.optimizer.lr"),
            Remedy("raise teacher.in_advantage, or lower algorithm.entropy_coefficient"),
        ),
        signs="rises: another term of the objective is stronger, or updates are too large",
    ),
    MetricEntry(
        "distillation/kl_loss",
        "falls towards 0; only with teacher.in_loss",
        (Remedy("lower actor.optimizer.lr"), Remedy("raise teacher.in_loss, or lower algorithm.entropy_coefficient")),
        signs="rises; far from distillation/kl without teacher.top_k: tokens were sampled from another distribution",
    ),
    MetricEntry(
        "distillation/hinted_fraction",
        "the share of tokens of rows with a hint; only with data.hint_key",
        (Remedy("set data.hint_key to a column that the rows have"),),
        signs="falls: rows without hints, or episodes whose sequences do not begin with the row's prompt",
    ),
    MetricEntry(
        "distillation/untaught_fraction",
        "the share of tokens of sources without a teacher; only with teacher.by_source",
        (Remedy("set teacher.hf_path, teacher.moving_average or teacher.url for all other sources"),),
        signs="1: no row of the step has a teacher",
    ),
    MetricEntry(
        "actor/clip_fraction",
        "0.001 to 0.2; 0 with one update per synchronous step",
        SLOWER,
        Warned(Above(0.3), "{now:.0%} of the tokens are clipped: {remedies}"),
        "0 with several updates per step: the learning rate is too low",
    ),
    MetricEntry(
        "actor/clip_fraction_high",
        "similar to actor/clip_fraction_low",
        (Remedy("raise algorithm.policy_loss.clip_high", _has_upper_clip, "if actor/entropy falls too"),),
        signs="far above actor/clip_fraction_low while actor/entropy falls: rare tokens cannot become more probable",
    ),
    MetricEntry(
        "actor/grad_norm",
        "stable within a factor of 3; absent for a skipped update (actor/skipped_updates)",
        (
            Remedy("look at this step's rollouts"),
            Remedy("lower actor.optimizer.clip_grad if this happens again"),
        ),
        Warned(
            Outlier(20), "the gradient's norm is {now:.3g}, {times:.0f} times the median of the last steps: {remedies}"
        ),
        "grows steadily; 0: no group has a signal",
    ),
    *loss_scale_entries("actor", lambda config: config.actor.optimizer.loss_scale),
)

AGREEMENT = (
    MetricEntry(
        "rollout/logp_diff_fresh_mean",
        "below 0.02 nats in bfloat16, below 0.003 in float16, below 0.0001 in float32",
        DIFFERENCE,
        Warned(
            Above(0.05),
            "log-probabilities of engine and trainer differ by {now:.3f} nats on average on tokens of the current "
            "weights. No correction removes a systematic difference: {remedies}",
        ),
        "grows during the run",
    ),
    MetricEntry(
        "rollout/logp_diff_max",
        "a few nats, on single tokens",
        (Remedy("color a response by log-probability difference in the report, and look at the token"),),
        signs="the same token or position in many responses: template, stop tokens or vocabulary differ",
    ),
    MetricEntry(
        "correction/effective_sample_fraction",
        "above 0.8; only with algorithm.correction.kind",
        DIFFERENCE[:1],
        Warned(
            Below(0.3), "the effective sample size is {now:.0%} of the samples: engine and trainer have drifted apart"
        ),
        "falls during the run",
    ),
)
