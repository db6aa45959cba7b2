"""Keys of adapters, the reference and the reward model: contradictions are rejected by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.rules.models import uses_lora, uses_reference, uses_reward_model
from mcore_rl.config.rules.validation import validate, validate_critic, validate_reward_model
from mcore_rl.errors import ConfigError

ON = ["actor.lora.rank=8"]
KL = "algorithm.kl"
ADAPTIVE = [f"{KL}.controller=adaptive", f"{KL}.in_reward=0.1", f"{KL}.target=0.02", f"{KL}.horizon=1000"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.lora.alpha=8"], r"^actor\.lora\.alpha=8\.0 has no effect.*set actor\.lora\.rank above 0"),
        (["actor.lora.rslora=true"], r"^actor\.lora\.rslora=True has no effect"),
        (["actor.lora.target_modules=[q_proj]"], r"^actor\.lora\.target_modules=\['q_proj'\] has no effect"),
        (["actor.lora.path=/adapter"], r"^actor\.lora\.path=/adapter has no effect.*or leave .* at null"),
        (["trainer.export_adapter=/out"], r"^trainer\.export_adapter=/out has no effect"),
        ([*ON, "actor.lora.alpha=0"], r"^actor\.lora\.alpha=0\.0 must be above 0"),
        ([*ON, "actor.lora.target_modules=[a,b,a]"], r"^actor\.lora\.target_modules=.* names a module twice"),
        ([*ON, "model.random_init=true"], r"^model\.random_init=True is not .* actor\.lora\.rank=8.*to false$"),
        ([*ON, "actor.mtp_loss_coefficient=0.1"], r"^actor\.mtp_loss_coefficient=0\.1 is not supported with .*to 0$"),
        ([*ON, "actor.moe.bias_update_rate=0.1"], r"^actor\.moe\.bias_update_rate=0\.1 is not supported with .*to 0$"),
        ([*ON, "actor.fp8=blockwise"], r"^actor\.fp8=blockwise is not supported with .*to none$"),
        (
            [*ON, "algorithm.kl.in_loss=0.1", "reference.refresh_every_steps=2"],
            r"^reference\.refresh_every_steps=2 is not supported with .*to 0$",
        ),
        (
            [*ON, "algorithm.kl.in_loss=0.1", "reference.offload=false"],
            r"^reference\.offload=False has no effect with actor\.lora\.rank=8.*or set reference\.hf_path$",
        ),
        (["actor.lora.ranks=1"], r"unknown key actor\.lora\.ranks; did you mean actor\.lora\.rank\?"),
        (["reference.hf_path=/other"], r"^reference\.hf_path=/other has no effect; set algorithm\.kl\.in_loss or"),
        (["reference.offload=false"], r"^reference\.offload=False has no effect"),
        (["reference.refresh_every_steps=5"], r"^reference\.refresh_every_steps=5 has no effect"),
        ([f"{KL}.in_loss=0.1", f"{KL}.loss_kind=k4"], r"^algorithm\.kl\.loss_kind=k4 must be one of k1, abs"),
        ([f"{KL}.in_reward=0.1", f"{KL}.loss_kind=abs"], r"^algorithm\.kl\.loss_kind=abs.*set algorithm\.kl\.in_loss"),
        ([f"{KL}.in_loss=0.1", f"{KL}.reward_kind=k3"], r"^algorithm\.kl\.reward_kind=k3.*algorithm\.kl\.in_reward"),
        ([f"{KL}.in_reward=0.1", f"{KL}.target=0.1"], r"^algorithm\.kl\.target=0\.1 has no.*controller=adaptive"),
        ([f"{KL}.in_reward=0.1", f"{KL}.horizon=9"], r"^algorithm\.kl\.horizon=9 has no.*controller=adaptive"),
        ([*ADAPTIVE, f"{KL}.in_reward=0"], r"set algorithm\.kl\.in_reward to an initial value above 0"),
        ([*ADAPTIVE, f"{KL}.target=null"], r"needs algorithm\.kl\.target above 0, not null"),
        ([f"{KL}.controller=pid"], r"^algorithm\.kl\.controller=pid must be one of fixed, adaptive"),
        (["reward.function=none"], r"^reward\.function=none leaves responses without a reward; set reward_model\.hf_"),
        (["reward_model.weight=2"], r"^reward_model\.weight=2\.0 has no effect; set reward_model\.hf_path, or leave"),
        (["reward_model.parallel.tp=2"], r"^reward_model\.parallel\.tp=2 has no effect; set reward_model\.hf_path"),
    ],
)
def test_contradictory_keys_are_rejected_by_name(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(load_config(base, overrides))


@pytest.mark.parametrize("override", ["rank=8", "alpha=8", "path=/adapter", "target_modules=[q_proj]"])
def test_validate_critic_lora_keys_are_rejected(base: str, override: str) -> None:
    config = load_config(base, [f"critic.lora.{override}"])
    with pytest.raises(
        ConfigError, match=rf"^critic\.lora\.{override.partition('=')[0]}=.*its value head starts random"
    ):
        validate_critic(config)


def test_check_lora_valid_combinations_pass(base: str) -> None:
    assert not uses_lora(load_config(base, []).actor)
    given = ["actor.lora.target_modules=[q_proj,v_proj]", "actor.lora.rslora=true", "trainer.export_adapter=/out"]
    config = load_config(base, [*ON, *given, "algorithm.kl.in_loss=0.1", "actor.lora.path=/adapter"])
    validate(config)
    validate_critic(config)
    assert uses_lora(config.actor)
    assert config.actor.lora.target_modules == ["q_proj", "v_proj"]


def test_uses_reference_any_coefficient_needs_one(base: str) -> None:
    assert not uses_reference(load_config(base, []).algorithm)
    of_source = "algorithm.per_source=[{source: a, kl_in_loss: 0.01}]"
    in_loss, in_reward = "algorithm.kl.in_loss=0.01", "algorithm.kl.in_reward=0.01"
    kinds = "algorithm.kl.loss_kind=k2", "algorithm.kl.reward_kind=k2"
    used = ([in_loss], [of_source, kinds[0]], [in_reward, kinds[1]], ADAPTIVE)
    for overrides in used:
        config = load_config(base, [*overrides, "reference.refresh_every_steps=3", "reference.offload=false"])
        validate(config)
        assert uses_reference(config.algorithm)


def scorer(base: str) -> str:
    return f"reward_model.hf_path={Path(base).parent}/scorer"


def test_check_rewards_reward_model_with_and_without_rule(base: str) -> None:
    layout = ["parallel.tp=2", "num_ranks=2", "tokens_per_microbatch=2048", "offload.params=true", "weight=-0.5"]
    overrides = [scorer(base), *(f"reward_model.{item}" for item in (*layout, "moe.dispatcher=allgather"))]
    for more in ([], ["reward.function=none"], ["cluster.placement=disaggregated", "actor.num_ranks=3"]):
        config = load_config(base, [*overrides, *more])
        validate(config)
        validate_reward_model(config)
        assert uses_reward_model(config.reward_model)
        assert (config.reward_model.parallel.tp, config.actor.parallel.tp) == (2, 1)
    assert not uses_reward_model(load_config(base).reward_model)


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=1e-3",
        "recompute=full",
        "mtp_loss_coefficient=0.1",
        "moe.router_replay=policy",
        "offload.grads=true",
        "lora.rank=4",
    ],
)
def test_check_rewards_training_keys_are_rejected(base: str, override: str) -> None:
    key = override.partition("=")[0].replace(".", r"\.")
    with pytest.raises(ConfigError, match=rf"^reward_model\.{key}=\S+ has no effect: a reward model is not trained"):
        validate(load_config(base, [scorer(base), f"reward_model.{override}"]))


def test_check_rewards_zero_weight_is_rejected(base: str) -> None:
    with pytest.raises(ConfigError, match=r"^reward_model\.weight=\S+ must be a number other than 0"):
        validate(load_config(base, [scorer(base), "reward_model.weight=0"]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["reward_model.parallel.tp=3"],
            r"^reward_model\.parallel\.tp=3.*divide the 4 ranks of the reward model \(reward_model\.",
        ),
        (["reward_model.fp8=some"], r"^reward_model\.fp8=some must be one of"),
        (["reward_model.tokens_per_microbatch=10"], r"^reward_model\.tokens_per_microbatch=10 must be at least"),
        (["reward_model.num_ranks=8"], r"^reward_model\.num_ranks=8, but cluster\.nodes"),
        (
            ["reward_model.num_ranks=3", "actor.num_ranks=2"],
            r"^reward_model\.num_ranks=3 ranks share the slots of the 2 trainer ranks; lower it",
        ),
        (["reward_model.hf_path=/nowhere"], r"^reward_model\.hf_path=/nowhere: no config\.json there"),
        (["reward_model.wieght=1"], r"unknown key reward_model\.wieght; did you mean reward_model\.weight\?"),
    ],
)
def test_validate_reward_model_errors_name_its_keys(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):  # noqa: PT012 - as a run does it
        validate(config := load_config(base, [scorer(base), *overrides]))
        validate_reward_model(config)
