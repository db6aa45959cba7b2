"""The configuration, which imports no torch, knows the names of the registries, and which of them compare groups."""

from __future__ import annotations

from mcore_rl.algorithms import aggregation, kl, registry
from mcore_rl.config import algorithm as names


def test_names_are_those_of_the_registries() -> None:
    assert set(names.ADVANTAGES) == set(registry.ADVANTAGES)
    assert set(names.POLICY_LOSSES) == set(registry.POLICY_LOSSES)
    assert set(names.KL_KINDS) == {*kl.KINDS, *kl.ALIASES}
    assert tuple(aggregation.MODE_OPTIONS) == names.LOSS_AGGREGATIONS


def test_estimators_that_compare_groups_are_known_and_so_is_supervised_training() -> None:
    assert set(names.GROUP_ADVANTAGES) == {name for name, entry in registry.ADVANTAGES.items() if entry.needs.group_ids}
    assert set(names.COMPARING_ADVANTAGES) == {
        name for name, entry in registry.ADVANTAGES.items() if entry.needs.group_ids or entry.needs.baseline_rewards
    }
    supervised = {name for name in registry.POLICY_LOSSES if not registry.policy_loss_needs(name).advantages}
    assert supervised == {names.SUPERVISED}
