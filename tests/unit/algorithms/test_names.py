"""Names in the configuration, which imports no torch, equal the names in the registries."""

from __future__ import annotations

import torch

from mcore_rl.algorithms import aggregation, kl, registry
from mcore_rl.config import algorithm as names


def test_config_names_equal_registry_names() -> None:
    assert set(names.ADVANTAGES) == set(registry.ADVANTAGES)
    assert set(names.POLICY_LOSSES) == set(registry.POLICY_LOSSES)
    assert set(names.KL_KINDS) == {*kl.KINDS, *kl.ALIASES}
    assert tuple(aggregation.MODE_OPTIONS) == names.LOSS_AGGREGATIONS


def test_metrics_of_one_name_have_one_type_in_all_losses() -> None:
    """Metrics of several sources are added, whatever their losses are."""
    generator = torch.Generator().manual_seed(0)
    logp, old_logp, rollout_logp, advantages = (torch.randn(4, 6, generator=generator) - 2 for _ in range(4))
    given = {"logp": logp, "old_logp": old_logp, "rollout_logp": rollout_logp, "advantages": advantages + 2}
    types: dict[str, set[type]] = {}
    for name in names.SAMPLED_LOSSES:
        result = registry.compute_policy_loss(name, mask=torch.ones(4, 6), staleness=torch.ones(4, 6), **given)
        for metric, value in result.metrics.items():
            types.setdefault(metric, set()).add(type(value))
    assert {metric: found for metric, found in types.items() if len(found) > 1} == {}


def test_config_name_sets_match_needs_of_registry_entries() -> None:
    assert set(names.GROUP_ADVANTAGES) == {name for name, entry in registry.ADVANTAGES.items() if entry.needs.group_ids}
    assert set(names.COMPARING_ADVANTAGES) == {
        name for name, entry in registry.ADVANTAGES.items() if entry.needs.group_ids or entry.needs.baseline_rewards
    }
    supervised = {name for name in registry.POLICY_LOSSES if not registry.policy_loss(name).needs.advantages}
    assert supervised == {names.SUPERVISED, names.PREFERENCE, names.SCORES}
