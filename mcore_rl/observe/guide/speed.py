"""Entries about speed: waiting times, staleness, throughput and restarts."""

from __future__ import annotations

from mcore_rl.config.schema import Config
from mcore_rl.observe.guide.conditions import Above
from mcore_rl.observe.guide.entries import Counted, MetricEntry, Remedy, Warned

SETTLED = 5
"""Number of initial steps without warnings about idle fractions, which are not representative yet."""


def _has_one_engine(config: Config) -> bool:
    return config.rollout.num_engines == 1


def _has_several_engines(config: Config) -> bool:
    return not _has_one_engine(config)


ASYNCHRONOUS = (
    MetricEntry(
        "staleness/mean",
        "at most rollout.max_staleness",
        (
            Remedy("lower rollout.max_staleness if actor/ppo_kl or actor/clip_fraction are high"),
            Remedy("raise it if the trainer waits"),
        ),
        signs="always at the limit: engines are far ahead of the trainer; always 0: the run could be synchronous",
    ),
    MetricEntry(
        "time/trainer_idle_fraction",
        "below 0.2",
        (
            Remedy("raise rollout.num_engines"),
            Remedy("raise rollout.max_concurrent_requests"),
            Remedy("raise rollout.max_staleness"),
            Remedy("give ranks to the engines"),
        ),
        Warned(
            Above(0.5), "the trainer ranks wait for responses {now:.0%} of the time: {remedies}", after_step=SETTLED
        ),
    ),
    MetricEntry(
        "time/generator_idle_fraction",
        "below 0.2",
        (
            Remedy(
                "lower rollout.num_engines and give their devices to the trainer ranks",
                _has_several_engines,
                "with several engines",
            ),
            Remedy("give the trainer more ranks", _has_one_engine, "with one engine"),
            Remedy("raise rollout.max_staleness"),
        ),
        Warned(Above(0.5), "engines have nothing to do {now:.0%} of the time: {remedies}", after_step=SETTLED),
    ),
)

SPEED = (
    MetricEntry(
        "throughput/tokens_per_second",
        "constant; rises with the length of responses",
        (
            Remedy("compare time/generate, time/update and time/weight_sync with an early step"),
            Remedy("profile a slow step with observe.profile.steps"),
        ),
        signs="falls while the lengths do not change: a device is throttled, or a phase grows",
    ),
    MetricEntry(
        "weights/delta_share",
        "below 0.3, with weights.delta; about 1 in the first sync and after an engine was restarted",
        (
            Remedy("set weights.delta=false: most weights change between two syncs"),
            Remedy("lower actor.optimizer.lr, or the number of updates per step, if they are too high anyway"),
        ),
        signs="near 1 in most steps: a delta saves nothing, and costs time and memory for its copies",
    ),
    MetricEntry(
        "engine/draft_acceptance",
        "above 0.1, with rollout.draft",
        (
            Remedy("lower rollout.draft_tokens if the last positions (engine/draft_acceptance_N) are near 0"),
            Remedy("lower rollout.draft_below"),
            Remedy("set rollout.draft=none if throughput/tokens_per_second is higher without drafts"),
        ),
        signs="near 0: responses repeat little of prompt or response, and drafts only add work",
    ),
    MetricEntry(
        "engine/restarts",
        "0",
        (
            Remedy("read the end of the engine's log in run.dir/logs"),
            Remedy("lower rollout.gpu_memory_fraction if the engine ran out of memory"),
        ),
        Counted("engines were restarted"),
    ),
)
