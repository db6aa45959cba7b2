"""Keys that parameters sharded over data-parallel ranks do not support."""

from __future__ import annotations

import pytest

from mcore_rl.config.models import ActorConfig, CriticConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.rules.models import reject_suggestions
from mcore_rl.config.rules.sharding import check_sharding
from mcore_rl.config.schema import ModelConfig
from mcore_rl.errors import ConfigError


def test_check_sharding_of_critic_names_its_own_keys() -> None:
    critic = CriticConfig()
    critic.parallel.pp = 2
    role = ModelRole.critic(critic, ModelConfig(hf_path=""))
    check_sharding(role)
    critic.parallel.shard_parameters = True
    with pytest.raises(ConfigError, match=r"critic\.parallel\.pp=2 .* with critic\.parallel\.shard_parameters=true"):
        check_sharding(role)


def test_reject_suggestions_of_sharded_parameters_names_the_key() -> None:
    actor = ActorConfig()
    reject_suggestions(actor)
    actor.parallel.shard_parameters = True
    with pytest.raises(ConfigError, match=r"actor\.parallel\.shard_parameters"):
        reject_suggestions(actor)


def test_reject_suggestions_of_fsdp2_names_the_strategy() -> None:
    actor = ActorConfig(strategy="fsdp2")
    with pytest.raises(ConfigError, match=r"actor\.strategy=fsdp2 has only one"):
        reject_suggestions(actor)


def test_check_sharding_of_fsdp2_accepts_adapters() -> None:
    actor = ActorConfig(strategy="fsdp2")
    actor.lora.rank = 4
    check_sharding(ModelRole.policy(actor, ModelConfig(hf_path="")))
