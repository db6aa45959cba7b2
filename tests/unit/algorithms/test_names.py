"""Names in the configuration, which imports no torch, equal the names in the registries."""

from __future__ import annotations

from mcore_rl.algorithms import aggregation, kl, registry
from mcore_rl.config import algorithm as names


def test_config_names_equal_registry_names() -> None:
    assert set(names.ADVANTAGES) == set(registry.ADVANTAGES)
    assert set(names.POLICY_LOSSES) == set(registry.POLICY_LOSSES)
    assert set(names.KL_KINDS) == {*kl.KINDS, *kl.ALIASES}
    assert tuple(aggregation.MODE_OPTIONS) == names.LOSS_AGGREGATIONS


def test_config_name_sets_match_needs_of_registry_entries() -> None:
    assert set(names.GROUP_ADVANTAGES) == {name for name, entry in registry.ADVANTAGES.items() if entry.needs.group_ids}
    assert set(names.COMPARING_ADVANTAGES) == {
        name for name, entry in registry.ADVANTAGES.items() if entry.needs.group_ids or entry.needs.baseline_rewards
    }
    supervised = {name for name in registry.POLICY_LOSSES if not registry.policy_loss(name).needs.advantages}
    assert supervised == {names.SUPERVISED, names.PREFERENCE, names.SCORES}
