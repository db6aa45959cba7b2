"""Agreement of the translations with the table of other trainers' names, and with the migration page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_bash")

from mcore_rl.config import load_config
from mcore_rl.config.reading.unknown_keys import ALIASES, known_keys
from mcore_rl.errors import ConfigError
from mcore_rl.migration.draft import Draft
from mcore_rl.migration.slime.reader import read_slime
from mcore_rl.migration.slime.translation import translate as translate_slime
from mcore_rl.migration.verl.reader import read_verl
from mcore_rl.migration.verl.translation import translate as translate_verl

SCRIPTS = Path(__file__).parent / "scripts"
PAGE = Path(__file__).parents[3] / "docs" / "migration.md"
SECOND_USES = {
    "actor.num_ranks": "cluster.gpus_per_node cluster.nodes",
    "algorithm.kl.reward_kind": "algorithm.kl.loss_kind",
    "algorithm.policy_loss.clip_high": "algorithm.policy_loss.clip_low",
    "algorithm.policy_loss.name": "algorithm.advantage",
    "cluster.placement": "cluster.nodes",
    "critic.num_ranks": "cluster.gpus_per_node cluster.nodes",
    "critic.parallel.tp": "actor.parallel.tp",
    "critic.tokens_per_microbatch": "actor.tokens_per_microbatch",
    "data.val_sets": "data.val",
    "reference.offload": "actor.offload.params",
    "rollout.nodes": "cluster.nodes",
    "rollout.validation_temperature": "rollout.temperature",
    "trainer.prompts_per_update": "trainer.prompts_per_step",  # supervised training has one update per step
}
"""Keys that a name determines in addition to the key in the table of names."""


def alias(name: str) -> str | None:
    words = name.removeprefix("--").replace("-", "_").lower().split(".")
    endings = (".".join(words[start:]) for start in range(len(words)))
    return next((ALIASES[ending] for ending in endings if ending in ALIASES), None)


def draft_of(name: str) -> Draft:
    if name.startswith("slime"):
        return translate_slime(read_slime(SCRIPTS / name, {}).settings)[1]
    return translate_verl(read_verl(SCRIPTS / name, {"1": "8", "SKYPILOT_NUM_NODES": "1"}).settings)[1]


@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPTS.glob("*.sh")))
def test_origin_in_the_table_of_names_has_the_same_key(name: str) -> None:
    draft = draft_of(name)
    assert draft.values
    for key, origin in draft.origins.items():
        match = re.match(r"(?:default of \w+'s )?(--[\w-]+|\w+(?:\.\w+)+)", origin)
        expected = None if match is None else alias(match[1])
        assert expected is None or expected == key or expected in SECOND_USES.get(key, "").split(), (key, origin)


def test_migration_page_names_keys_that_exist() -> None:
    sections = "run model data rollout reward judge algorithm actor critic reference trainer checkpoint cluster"
    rows = re.findall(r"^\| .* \| (.*) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`((?:\w+\.)+\w+)", row)]
    ours = [name for name in named if name.split(".")[0] in sections.split()]
    assert len(ours) > 40
    assert [name for name in ours if name not in known_keys()] == []


def test_configuration_of_verl_names_the_importer() -> None:
    path = SCRIPTS / "trainer.yaml"
    with pytest.raises(ConfigError, match=f"translate it with `mcore-rl import-verl {re.escape(str(path))}"):
        load_config(path)
