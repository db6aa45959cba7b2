"""The guide names existing metrics and keys, and each warning has a remedy and all fields of its template."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.config.reading.unknown_keys import known_keys
from mcore_rl.config.schema import Config
from mcore_rl.observe.guide.entries import MetricEntry, Warned
from mcore_rl.observe.guide.table import ENTRIES, GRADIENT, GUIDE

PACKAGE = Path(__file__).parents[4] / "mcore_rl"
FIELDS = {"now", "first", "times", "reward", "graders", "remedies"}
FIRST_LOOK = """
reward/mean val/accuracy actor/entropy actor/ppo_kl actor/kl_reference actor/clip_fraction actor/clip_fraction_high
actor/grad_norm rollout/logp_diff_fresh_mean staleness/mean response_tokens/clipped_fraction groups/dropped
reward/errors throughput/tokens_per_second
""".split()


def texts_of(entry: MetricEntry) -> Iterator[str]:
    yield from (entry.healthy, entry.signs, *(remedy.text for remedy in entry.remedies))
    if entry.alert is not None:
        yield entry.alert.text


def test_guide_covers_metrics_of_a_first_look_once() -> None:
    assert set(FIRST_LOOK) <= set(ENTRIES)
    assert len(ENTRIES) == sum(len(entries) for entries in GUIDE.values())


def test_guide_keys_exist() -> None:
    sections = {key.partition(".")[0] for key in known_keys()} - {"run"}
    found = {
        word
        for entry in ENTRIES.values()
        for text in texts_of(entry)
        for word in re.findall(r"\b[a-z_]+(?:\.[a-z_0-9]+)+", text)
        if word.partition(".")[0] in sections and not word.endswith((".json", ".jsonl"))
    }
    assert len(found) > 10
    assert found - set(known_keys()) == set()


def test_guide_metrics_are_produced_by_the_code() -> None:
    guide = PACKAGE / "observe" / "guide"
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if guide not in path.parents)
    # The prefix of a metric may be added elsewhere.
    absent = [
        name
        for name in ENTRIES
        if f'/{name.partition("/")[2]}"' not in code and f'"{name.partition("/")[2]}"' not in code
    ]
    assert absent == []


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_guide_entry_has_remedy_and_known_fields(entry: MetricEntry) -> None:
    assert entry.healthy
    assert entry.remedies
    assert all((remedy.when == "") == (remedy.applies.__name__ == "_always") for remedy in entry.remedies)
    if isinstance(entry.alert, Warned):
        named = {name for _, name, _, _ in string.Formatter().parse(entry.alert.text) if name}
        assert named <= FIELDS
        # The template would have no text in the place of the remedies.
        assert any(remedy.applies(Config()) for remedy in entry.remedies)
    if entry.name == GRADIENT:
        assert all(not remedy.when for remedy in entry.remedies)
