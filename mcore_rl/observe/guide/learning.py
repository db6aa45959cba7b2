"""Entries about rewards, groups and responses: is there anything to learn, and is it learned?"""

from __future__ import annotations

from mcore_rl.config.schema import Config
from mcore_rl.observe.guide.conditions import WINDOW, Above, Below, Equal, Fallen, Risen
from mcore_rl.observe.guide.entries import Counted, MetricEntry, Remedy, Warned
from mcore_rl.observe.guide.loss_scale import loss_scale_entries


def _overlong_unpunished(config: Config) -> bool:
    return not config.reward.punishes_overlong


REWARDS = (
    MetricEntry(
        "reward/mean",
        "rises over tens of steps, with noise from step to step",
        (
            Remedy("read responses in the report: high rewards must be deserved"),
            Remedy("grade a line of rollouts/ by hand if the reward stays flat"),
        ),
        signs="flat from the beginning; rises while val/accuracy does not (the reward is exploited); a sudden drop",
    ),
    MetricEntry(
        "val/accuracy",
        "rises with reward/mean; step 0 is before training",
        (
            Remedy("compare responses of rollouts/val_step_<n>.jsonl with those of training"),
            Remedy("use the best checkpoint (checkpoint.keep_best)"),
            Remedy("lower actor.optimizer.lr"),
        ),
        signs="falls while reward/mean rises; differs between data sources (val/accuracy/<source>)",
    ),
    MetricEntry(
        "reward/errors",
        "0",
        (
            Remedy("read the field `error` of the records in rollouts/"),
            Remedy("set reward.max_error_fraction, which stops the run when more responses cannot be graded"),
        ),
        Counted("responses could not be graded; they have the filter `error` below"),
    ),
    MetricEntry(
        "val/errors",
        "0",
        (Remedy("read the field `error` of the records in rollouts/val_step_<n>.jsonl"),),
        Counted("validation responses could not be graded"),
    ),
    MetricEntry(
        "episode/failed",
        "0",
        (Remedy("read the field `error` of the records in rollouts/, and logs/ of the engines"),),
        Counted("episodes failed (sum of the fractions of the steps)"),
    ),
)

GROUPS = (
    MetricEntry(
        "groups/without_signal",
        "below 0.7; the other groups train",
        (Remedy("look at groups/solved_all and groups/solved_none, and at the reward"),),
        Warned(
            Above(0.95),
            "in {now:.0%} of the groups all rewards are equal, so they do not train: {remedies}",
        ),
        "rises during the run: the prompts become too easy",
    ),
    MetricEntry(
        "groups/all_equal",
        "0",
        (Remedy("grade a line of rollouts/ by hand"),),
        Warned(
            Equal(1),
            "all scores of the step are equal (mean reward {reward:g}): {graders} cannot tell responses apart. "
            "Probable causes: it catches its own errors and returns a constant, it looks for a form of answer that the "
            "prompts do not ask for, or data.answer_key names another column than it compares with. Remedy: {remedies}",
        ),
    ),
    MetricEntry(
        "groups/dropped",
        "below half of groups/drawn",
        (
            Remedy("use prompts of medium difficulty"),
            Remedy("raise rollout.samples_per_prompt, which makes equal groups less probable"),
            Remedy("raise algorithm.dynamic_sampling.max_batches only if steps are not full"),
        ),
        signs="near groups/drawn: most of the generation is discarded, and time/generate grows",
    ),
    MetricEntry(
        "response_tokens/mean",
        "changes slowly; grows in tasks that need reasoning",
        (Remedy("look at rollouts/ for a shortcut that is rewarded"),),
        Warned(Fallen(0.3), "responses shrank from {first:.0f} to {now:.0f} tokens: {remedies}"),
        "grows while the accuracy does not: compare response_tokens/mean_right with response_tokens/mean_wrong",
    ),
    MetricEntry(
        "response_tokens/clipped_fraction",
        "below 0.1: responses that reach rollout.max_response_tokens",
        (
            Remedy("raise rollout.max_response_tokens"),
            Remedy("set reward.overlong.enable=true", _overlong_unpunished, "if long responses are not punished yet"),
        ),
        Warned(Risen(0.5, 0.2), "{now:.0%} of the responses are cut off, {first:.0%} at first: {remedies}"),
        "rises steadily: responses grow without limit",
    ),
    MetricEntry(
        "critic/explained_variance",
        "above 0 after the first steps, then towards 1",
        (Remedy("change critic.optimizer.lr"), Remedy("raise trainer.critic_warmup_steps")),
        Warned(
            Below(-0.5),
            "the critic explains {now:.2f} of the returns' variance, less than a constant would: {remedies}",
            after_step=WINDOW,
        ),
        "stays near 0: the critic learns nothing",
    ),
    *loss_scale_entries("critic", lambda config: config.critic.optimizer.loss_scale),
)

TEXTS = (
    MetricEntry(
        "val/loss",
        "falls, then flattens; only with another trainer.objective than rl",
        (
            Remedy("stop at the lowest value: more epochs only repeat the data"),
            Remedy("lower actor.optimizer.lr"),
        ),
        signs="rises while actor/loss falls: the model memorizes the training rows",
    ),
    MetricEntry(
        "preference/accuracy",
        "about 0.5 at the first step if the reference is the initial policy or the value head is new, then 0.6 to 0.9",
        (
            Remedy("raise actor.optimizer.lr if it stays near 0.5"),
            Remedy("look for pairs with swapped labels, or set preference.label_smoothing (dpo)"),
        ),
        signs="near 1 while val/accuracy does not rise: the model memorizes the pairs",
    ),
    MetricEntry(
        "preference/chosen_reward",
        "near 0 or rising, with a growing preference/margin",
        (
            Remedy("raise preference.beta (dpo), or preference.center_rewards_coefficient (reward_model)"),
            Remedy("lower actor.optimizer.lr"),
        ),
        signs="falls as fast as preference/rejected_reward: the policy moves away from both responses",
    ),
)
"""Entries about training on texts of the data set."""
