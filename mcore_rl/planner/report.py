"""Tables of a plan for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.planner.engine import GIB, EngineRank
from mcore_rl.planner.overlap import Overlap, if_asynchronous
from mcore_rl.planner.phases import PHASES
from mcore_rl.planner.plan import Plan
from mcore_rl.planner.state import RankState
from mcore_rl.planner.suggest import Suggestions
from mcore_rl.planner.sync import SyncAmounts, WeightSync
from mcore_rl.planner.times import StepSeconds
from mcore_rl.planner.workload import StepFlops

UNKNOWN = "set plan.peak_tflops and plan.memory_bandwidth_gib_per_second"


def print_plan(plan: Plan, console: Console) -> None:
    """Print summary, stages, the fullest rank, then warnings and errors."""
    console.print(_summary(plan))
    for table in _stages(plan):
        console.print(table)
    console.print(_fullest(plan))
    kinds = {
        "[yellow]warning[/]": plan.verdict.warnings,
        "[red]error[/]": plan.verdict.errors,
        "[yellow]cannot run yet[/]": plan.cannot_run,
    }
    for kind, messages in kinds.items():
        for message in messages:
            # Without highlight, rich does not colour the numbers in a message.
            console.print(f"{kind}: {escape(message)}", highlight=False)
    conclusion = "[yellow]fits, cannot run yet[/]" if plan.cannot_run else "[green]fits[/]"
    console.print(conclusion if plan.fits else "[red]does not fit[/]")


def print_suggestions(found: Suggestions, console: Console) -> None:
    """Print the layouts, fastest first, with the keys to set and the cost of each."""
    for place, suggestion in enumerate(found.suggestions, 1):
        checked = "confirmed by an exact plan" if suggestion.exact else "estimated"
        console.print(
            f"{place}. about {suggestion.estimated_step_seconds:.0f} s of updates per step, fullest rank "
            f"{_gib(suggestion.peak_bytes)} ({checked})",
            highlight=False,
        )
        # One line that can be copied to a command line.
        console.print(f"   {escape(' '.join(suggestion.overrides))}", highlight=False, soft_wrap=True)
        console.print(f"   gives up: {escape('; '.join(suggestion.gives_up) or 'nothing')}", highlight=False)
    console.print(found.problem or f"{found.tried} layouts divide the ranks and the model", highlight=False)


def _summary(plan: Plan) -> Table:
    layout, sync, batch, engine, flops = plan.layout, plan.sync, plan.times.batch, plan.times.engine, plan.times.flops
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp", "edp")}
    shown = " ".join(f"{name} {size}" for name, size in sizes.items() if size and (size > 1 or name in {"tp", "pp"}))
    responses = (
        f"{batch.responses} responses, {batch.tokens / 1e6:.2f} million tokens expected, {batch.updates} updates of "
        f"{batch.responses_per_update} responses, about {batch.microbatches} micro-batches per rank each"
    )
    cache = (
        f"weights {_gib(engine.weights_bytes)}, KV cache {_gib(max(engine.kv_cache_bytes, 0))} for "
        f"{engine.sequences:.1f} sequences of full length{_all_ranks(engine)}"
    )
    engines = [("engine rank", cache), *sync_rows(sync)]
    if is_supervised(plan.times.config.algorithm):
        engines = [("engines", "none: no responses are generated")]
    rows = [
        ("trainer ranks", f"{layout.world_size}: {shown}"),
        ("parameters", f"{plan.size.total / 1e9:.2f} billion, {plan.size.active / 1e9:.2f} active per token"),
        ("batch", responses),
        *engines,
        ("host memory", f"{_gib(plan.verdict.host.total)} per node: {plan.verdict.host.describe()}"),
        ("FLOP per step", ", ".join(f"{name} {getattr(flops, name):.2e}" for name in _phases(flops))),
        *_time(plan),
    ]
    return _rows("Plan", rows)


def _all_ranks(engine: EngineRank) -> str:
    """Name the sequences of the whole engine, if its ranks have different ones."""
    return f", {engine.engine_sequences:.1f} on all ranks" if engine.request_ranks > 1 else ""


def sync_rows(sync: WeightSync) -> list[tuple[str, str]]:
    """Format a sync of all weights, and later syncs if they lack frozen weights."""
    files = f", {_gib(sync.directory_bytes)} in weights.directory" if sync.directory_bytes else ""
    moved = f"{_moved(sync)}, {sync.transport}, at most {sync.max_peers} peers per rank{_across(sync)}{files}"
    rows = [("weight sync", moved)]
    if sync.later is not None:
        rows.append(("later syncs", f"{_moved(sync.later)}{_across(sync.later)}; without frozen weights"))
    return rows


def _moved(sync: SyncAmounts) -> str:
    received, floor = _gib(sync.bytes_per_engine_rank), _gib(sync.floor_bytes_per_engine_rank)
    return f"{received} per engine rank (floor {floor}), {sync.buckets} buckets"


def _across(sync: SyncAmounts) -> str:
    if not sync.bytes_crossing_hosts:
        return ""
    seconds = "" if sync.seconds is None else f", {sync.seconds:.1f} s at plan.network_gib_per_second"
    across, busiest = _gib(sync.bytes_crossing_hosts), _gib(sync.busiest_sender_bytes)
    return f", {across} across hosts, {busiest} from the busiest sender{seconds}"


def _phases(flops: StepFlops) -> list[str]:
    """Return the phases of a step; a model beside the policy has one only if it runs in this job."""
    models = [name for name in ("reward_model", "teacher", "critic") if getattr(flops, name)]
    return ["generate", "logp", *models, "update"]


def _time(plan: Plan) -> list[tuple[str, str]]:
    overlap = plan.overlap
    if overlap is not None:
        return overlap_rows(overlap)
    ahead = if_asynchronous(plan.times, plan.layout, plan.sync)
    phases = _phases(plan.times.flops)
    known = {name: getattr(plan.seconds, name) for name in phases if name != "generate" or plan.times.flops.generate}
    shown = (f"{name} {'unknown' if value is None else f'{value:.1f} s'}" for name, value in known.items())
    seconds = UNKNOWN if all(value is None for value in known.values()) else ", ".join(shown)
    return [("time per step", seconds), *(gain_row(ahead, plan.seconds) if ahead is not None else [])]


def _times(seconds: StepSeconds, overlap: Overlap) -> tuple[float | None, ...]:
    swap = overlap.swap_seconds or 0.0
    others = seconds.reward_model, seconds.teacher, seconds.critic
    return seconds.generate, seconds.logp, *others, seconds.update, swap


def gain_row(overlap: Overlap, seconds: StepSeconds) -> list[tuple[str, str]]:
    """Format the possible gain of a synchronous run that takes `seconds`; no row if the times are unknown."""
    ahead, alone = overlap.step_seconds, _times(seconds, overlap)
    known = [value for value in alone if value is not None]
    if ahead is None or len(known) < len(alone):
        return []
    return [("asynchronous", f"rollout.max_staleness=1 takes {ahead:.1f} s per step instead of {sum(known):.1f} s")]


def overlap_rows(overlap: Overlap) -> list[tuple[str, str]]:
    """Format the rows of an asynchronous run."""
    bound = f"at most {overlap.max_staleness} versions"
    staleness = bound if overlap.mean_staleness is None else f"{overlap.mean_staleness:.1f} on average, {bound}"
    return [("time per step", _overlapped(overlap)), ("slots", _slots(overlap)), ("staleness", staleness)]


def _overlapped(overlap: Overlap) -> str:
    if overlap.step_seconds is None:
        return UNKNOWN
    swap = "unknown, set plan.network_gib_per_second"
    if overlap.swap_seconds is not None:
        swap = f"{overlap.swap_seconds:.1f} s"
    waiting = "neither side waits"
    if overlap.trainer_idle_fraction:
        waiting = f"the trainer waits {overlap.trainer_idle_fraction:.0%} of it"
    elif overlap.generator_idle_fraction:
        waiting = f"engines wait {overlap.generator_idle_fraction:.0%} of it"
    return (
        f"{overlap.step_seconds:.1f} s: generate {overlap.generate_seconds:.1f} s while logp and update take "
        f"{overlap.train_seconds:.1f} s, weight swap {swap}; {waiting}"
    )


def _slots(overlap: Overlap) -> str:
    present = f"{overlap.engine_gpus} generate, {overlap.trainer_gpus} train"
    if overlap.balanced_overrides is None:
        return present
    if not overlap.balanced_overrides:
        return f"{present}: no other split is faster"
    return (
        f"{present}; {overlap.balanced_engine_gpus} and {overlap.balanced_trainer_gpus} would take "
        f"{overlap.balanced_step_seconds:.1f} s: {' '.join(overlap.balanced_overrides)}"
    )


def _stages(plan: Plan) -> list[Table]:
    """Build two tables for the fullest rank of each stage: its contents, and the use of its device in each phase.

    One table would be wider than a terminal of 80 columns.
    """
    size = plan.layout.stage_size
    fullest = [
        max(plan.ranks[stage * size : (stage + 1) * size], key=lambda planned: planned.phases.peak_bytes)
        for stage in range(plan.layout.pp)
    ]
    names = [name for name in PHASES if any(name in planned.phases.by_name for planned in plan.ranks)]
    contents = [
        (f"{planned.state.parameters / 1e9:.3f}", *_tenths([*_parts(planned.state).values(), planned.activation_bytes]))
        for planned in fullest
    ]
    phases = [_tenths(planned.phases.by_name.get(name, 0) for name in names) for planned in fullest]
    columns = ("10⁹ params", "weights", "grads", "optimizer", "activations")
    return [
        _by_stage("Held by the fullest rank of each stage, GiB", columns, contents),
        _by_stage("On its device in each phase, GiB", names, phases),
    ]


def _by_stage(title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """Build a table with one line for each run of equal stages."""
    table = Table(title=title)
    for column in ("stage", *columns):
        table.add_column(column, justify="right", no_wrap=True)
    # groupby joins neighbours only, so each line is a range of stages.
    for values, equal in groupby(enumerate(rows), key=lambda line: line[1]):
        stages = [stage for stage, _ in equal]
        table.add_row(f"{stages[0]}-{stages[-1]}" if len(stages) > 1 else str(stages[0]), *values)
    return table


def _parts(state: RankState) -> dict[str, float]:
    return {
        "weights": state.weights_bytes,
        "gradients": state.gradients_bytes,
        "optimizer": state.optimizer_bytes,
    }


def _tenths(sizes: Iterable[float]) -> tuple[str, ...]:
    return tuple(f"{num_bytes / GIB:.1f}" for num_bytes in sizes)


def _fullest(plan: Plan) -> Table:
    planned = plan.fullest
    activations = plan.stages[planned.stage].components
    gathered = planned.state.gathered_update_bytes
    # A rank without expert parallelism gathers all experts of a layer.
    name = "gathered layers, with all experts" if plan.size.experts and plan.layout.ep == 1 else "gathered layers"
    parts = _parts(planned.state) | ({name: gathered} if gathered else {})
    parts |= {f"activations: {name}": size for name, size in activations.items()}
    title = f"Fullest rank: {planned.rank} (stage {planned.stage}), {_gib(planned.phases.peak_bytes)} in phase "
    return _rows(title + planned.phases.widest, [(name, _gib(value)) for name, value in parts.items()])


def _rows(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
