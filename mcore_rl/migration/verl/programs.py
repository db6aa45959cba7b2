"""Programs that verl's scripts start: its own trainers, and trainers of recipes with other algorithms."""

from __future__ import annotations

import re

from mcore_rl.migration.shell.words import UNKNOWN
from mcore_rl.migration.verl.run import MODULE, VerlRun

TRAINERS = (
    "main_ppo main_ppo_sync main_ppo_split main_dapo main_entropy fully_async_main sft_trainer sft_trainer_ray "
    "fsdp_sft_trainer"
).split()
"""Programs whose algorithm the settings describe."""
OTHER_ALGORITHMS = {
    "main_prime": "PRIME trains an implicit process reward model",
    "main_sppo": "SPPO has a loss of its own",
    "main_spin": "SPIN trains on pairs of its own responses; trainer.objective=dpo reads pairs from files",
    "main_flowrl": "FlowRL has a loss of its own",
    "main_gkd": "distillation is not translated; set teacher.* (docs/distillation.md)",
    "main_dance": "images and videos are not generated here",
    "main_sac": "vision-language-action models are not supported",
    "main_rep_exp": "rewards for exploration come from the recipe's code",
    "spo_main_ppo": "SPO has advantages of its own",
    "gvpo_main_ppo": "GVPO has a loss of its own",
}
"""Program of a recipe -> reason why its settings do not describe the training."""


def check_program(run: VerlRun) -> None:
    """Block programs with another algorithm, and list programs that are unknown."""
    setting = run.source.find(MODULE)
    if setting is None or UNKNOWN.search(run.module) or not run.module:
        return
    name = re.split(r"[./]", run.module.removesuffix(".py"))[-1]
    if name in OTHER_ALGORITHMS:
        run.draft.block(setting, OTHER_ALGORITHMS[name])
    elif ".vla." in run.module:
        run.draft.block(setting, OTHER_ALGORITHMS["main_sac"])
    elif name not in TRAINERS:
        run.draft.changes.append(
            f"{run.module} is not one of verl's trainers ({', '.join(TRAINERS[:3])}, ...): settings and changes of the "
            "algorithm that only its code has are not translated"
        )
