"""Roles: checks of the critic and the keys that errors name."""

from __future__ import annotations

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.rules.validation import validate, validate_critic
from mcore_rl.errors import ConfigError


def test_critic_config_actor_keys_with_own_defaults(base: str) -> None:
    config = load_config(base, ["critic.parallel.tp=2", "critic.optimizer.warmup_steps=3", "actor.optimizer.lr=2e-6"])
    validate_critic(config)
    assert (config.critic.parallel.tp, config.actor.parallel.tp) == (2, 1)
    assert (config.critic.optimizer.lr, config.critic.optimizer.warmup_steps) == (1e-5, 3)
    assert config.actor.optimizer.warmup_steps == 0


def test_num_critic_ranks_defaults_to_the_policy(base: str) -> None:
    slots = ["cluster.gpus_per_node=3", "actor.num_ranks=2", "critic.parallel.ep=2"]
    validate_critic(load_config(base, slots))
    with pytest.raises(ConfigError, match=r"critic\.parallel\.ep=2 .* does not divide the 3 trainer ranks"):
        validate_critic(load_config(base, [*slots, "critic.num_ranks=3"]))


def test_critic_role_has_its_own_section_checkpoint_and_keys(base: str) -> None:
    config = load_config(base, ["critic.recompute=full", "model.dtype=bfloat16"])
    role = ModelRole.critic(config.critic, config.model)
    assert (role.section, role.model, role.checkpoint) == (config.critic, config.model, "model.hf_path")
    config.critic.hf_path = "/elsewhere"
    role = ModelRole.critic(config.critic, config.model)
    assert (role.model.hf_path, role.model.dtype, role.checkpoint) == ("/elsewhere", "bfloat16", "critic.hf_path")
    assert role.key("parallel.tp") == "critic.parallel.tp"
    assert config.model.hf_path != "/elsewhere"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["critic.parallel.tp=3"], r"critic\.parallel\.tp=3.*does not divide the 4 trainer ranks \(critic\.num_ranks"),
        (["critic.recompute=some"], r"^critic\.recompute=some must be one of"),
        (["critic.optimizer.eps=0"], r"^critic\.optimizer\.eps"),
        (["critic.tokens_per_microbatch=10"], r"^critic\.tokens_per_microbatch=10 must be at least"),
        (["critic.overlap_param_gather=true"], r"^critic\.overlap_param_gather=true needs critic\."),
        (["critic.hf_path=/nowhere"], r"^critic\.hf_path=/nowhere: no config\.json there"),
        (["critic.mtp_loss_coefficient=0.1"], r"^critic\.mtp_loss_coefficient=0\.1 has no effect"),
        (["critic.moe.router_replay=policy"], r"^critic\.moe\.router_replay=policy has no effect"),
        (["critic.clip_range=0"], r"^critic\.clip_range=0\.0 must be above 0"),
        (["critic.update_epochs=0"], r"^critic\.update_epochs=0 must be at least 1"),
        (["critic.clip_rnge=1"], r"unknown key critic\.clip_rnge; did you mean critic\.clip_range\?"),
    ],
)
def test_validate_critic_errors_name_its_keys(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):  # noqa: PT012 - as a run does it
        validate(config := load_config(base, overrides))
        validate_critic(config)


def test_critic_clip_range_may_be_null(base: str) -> None:
    config = load_config(base, ["critic.clip_range=null"])
    validate_critic(config)
    assert config.critic.clip_range is None
