"""Translation of slime's arguments."""

from __future__ import annotations

from mcore_rl.migration.draft import Draft, Translation
from mcore_rl.migration.slime.algorithm import translate_algorithm
from mcore_rl.migration.slime.batches import translate_batches, translate_schedule
from mcore_rl.migration.slime.cluster import translate_cluster
from mcore_rl.migration.slime.data import translate_data
from mcore_rl.migration.slime.defaults import DEFAULTS
from mcore_rl.migration.slime.ranks import translate_ranks
from mcore_rl.migration.slime.rollout import translate_rollout
from mcore_rl.migration.slime.run import SlimeRun
from mcore_rl.migration.slime.uncovered import block_unsupported, list_uncovered
from mcore_rl.migration.source import Setting, Source


def translate(settings: dict[str, Setting], rows: int | None = None, name: str = "imported") -> Translation:
    """Translate arguments of slime.

    rows: number of training prompts, to compute steps from epochs. name: run.dir of a run without a name.
    """
    source, draft = Source("slime", settings, DEFAULTS, prefix="--", name=name), Draft()
    run = SlimeRun(source, draft, rows)
    translate_data(run)
    translate_algorithm(run)
    if not run.is_supervised:
        translate_rollout(run)
    translate_batches(run)
    translate_cluster(run)
    translate_ranks(run)
    translate_schedule(run)
    block_unsupported(run)
    return Translation(source, draft, list_uncovered(source))
