"""Rows of the plan's table about asynchronous training."""

from __future__ import annotations

from mcore_rl.planner.asynchronous.overlap import Overlap
from mcore_rl.planner.flops import StepSeconds

UNKNOWN = "set plan.peak_tflops and plan.memory_bandwidth_gib_per_second"


def overlap_rows(overlap: Overlap) -> list[tuple[str, str]]:
    """Format the rows of an asynchronous run."""
    return [("time per step", _time(overlap)), ("slots", _slots(overlap)), ("staleness", _staleness(overlap))]


def gain_row(overlap: Overlap, seconds: StepSeconds) -> list[tuple[str, str]]:
    """Format the possible gain of a synchronous run that takes `seconds`; no row if the times are unknown."""
    ahead, alone = overlap.step_seconds, (seconds.generate, seconds.logp, seconds.update, overlap.swap_seconds or 0.0)
    known = [value for value in alone if value is not None]
    if ahead is None or len(known) < len(alone):
        return []
    return [("asynchronous", f"rollout.max_staleness=1 takes {ahead:.1f} s per step instead of {sum(known):.1f} s")]


def _time(overlap: Overlap) -> str:
    step, generate, train = overlap.step_seconds, overlap.generate_seconds, overlap.train_seconds
    if step is None:
        return UNKNOWN
    swap = "unknown, set plan.network_gib_per_second"
    if overlap.swap_seconds is not None:
        swap = f"{overlap.swap_seconds:.1f} s"
    return (
        f"{step:.1f} s: generate {generate:.1f} s while logp and update take {train:.1f} s, weight swap {swap}; "
        f"{_waiting_side(overlap)}"
    )


def _waiting_side(overlap: Overlap) -> str:
    for side, share in (
        ("the trainer waits", overlap.trainer_idle_fraction),
        ("engines wait", overlap.generator_idle_fraction),
    ):
        if share:
            return f"{side} {share:.0%} of it"
    return "neither side waits"


def _slots(overlap: Overlap) -> str:
    present = f"{overlap.engine_gpus} generate, {overlap.trainer_gpus} train"
    balance = overlap.balance
    if balance is None:
        return present
    if not balance.overrides:
        return f"{present}: no other split is faster"
    return (
        f"{present}; {balance.engine_gpus} and {balance.trainer_gpus} would take {balance.step_seconds:.1f} s: "
        f"{' '.join(balance.overrides)}"
    )


def _staleness(overlap: Overlap) -> str:
    bound = f"at most {overlap.max_staleness} versions"
    return bound if overlap.mean_staleness is None else f"{overlap.mean_staleness:.1f} on average, {bound}"
