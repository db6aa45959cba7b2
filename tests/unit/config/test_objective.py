"""trainer.objective selects the loss, rejects keys without effect, and decides about the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rl.config.load import as_yaml, load_config
from mcore_rl.config.rules.models import has_reference
from mcore_rl.config.rules.objective import is_warm_start, responses_per_prompt
from mcore_rl.config.rules.validation import validate_keys
from mcore_rl.errors import ConfigError

DPO = ["trainer.objective=dpo", "trainer.prompts_per_step=8", "trainer.prompts_per_update=8"]

SCORES = ["trainer.objective=reward_model", *DPO[1:]]


def test_objective_dpo_selects_its_loss_and_reads_back(base: str, tmp_path: Path) -> None:
    config = load_config(base, DPO)
    validate_keys(config)
    assert config.algorithm.policy_loss.name == "dpo"
    written = tmp_path / "saved.yaml"
    written.write_text(as_yaml(config))
    # A resumed run reads the loss that the objective has selected.
    again = load_config(str(written))
    validate_keys(again)
    assert again == config
    assert load_config(base).algorithm.policy_loss.name == "ppo_clip"


@pytest.mark.parametrize(
    "key",
    [
        "rollout.temperature=0.7",
        "rollout.samples_per_prompt=4",
        "rollout.engine=sglang",
        "algorithm.advantage=rloo",
        "algorithm.loss_aggregation=seq-mean-token-sum",
        "algorithm.kl.in_loss=0.1",
        "algorithm.entropy_coefficient=0.1",
        "algorithm.corrections=[{kind: reject}]",
        "reward.function=none",
        "judge.hf_path=x",
        "reward_model.hf_path=x",
        "critic.optimizer.lr=1",
        "weights.verify_every=1",
        "sandbox.seconds=3",
        "observe.keep_trajectories=1",
        "trainer.critic_warmup_steps=1",
        "checkpoint.drain=true",
        "data.answer_key=a",
        "actor.mtp_loss_coefficient=0.1",
    ],
)
def test_objective_dpo_rejects_keys_without_effect(base: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key.partition('=')[0]}=.*trainer\.objective=dpo"):
        validate_keys(load_config(base, [*DPO, key]))


def test_objective_sft_has_no_best_checkpoint(base: str) -> None:
    validate_keys(load_config(base, ["trainer.objective=sft", "checkpoint.keep_best=0"]))
    validate_keys(load_config(base, [*DPO, "checkpoint.keep_best=3"]))
    with pytest.raises(ConfigError, match=r"^checkpoint\.keep_best=3 has no effect with trainer\.objective=sft"):
        validate_keys(load_config(base, ["trainer.objective=sft", "checkpoint.keep_best=3"]))


@pytest.mark.parametrize("loss", ["trainer.objective=sft", "algorithm.policy_loss.name=sft"])
def test_objective_sft_needs_a_text_for_every_rank(base: str, loss: str) -> None:
    def check(texts: int) -> None:
        steps = [f"trainer.prompts_per_step={texts}", f"trainer.prompts_per_update={texts}"]
        validate_keys(load_config(base, [loss, *steps]))

    check(4)
    with pytest.raises(
        ConfigError, match=r"^trainer\.prompts_per_update must be at least 4, the number of data-parall"
    ):
        check(2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.prompts_per_update=4"], r"one update per step.*prompts_per_update=4"),
        (["trainer.update_epochs=2"], r"one update per step.*update_epochs=2"),
        (["data.long_prompts=truncate_left"], r"data\.long_prompts=truncate_left: a trained text"),
        (["data.cache_dir=cache"], r"data\.cache_dir=cache is not supported"),
        (["algorithm.policy_loss.name=gspo"], r"algorithm\.policy_loss\.name=gspo has no effect"),
        (["preference.beta=0"], r"preference\.beta=0.* must be above 0"),
        (["preference.label_smoothing=0.5"], r"preference\.label_smoothing=0\.5 must be .*below 0\.5"),
        (["reference.refresh_every_steps=3"], r"reference\.refresh_every_steps=3 has no effect"),
        (["preference.reference_free=true", "reference.offload=false"], r"reference\.offload=False has no effect"),
        (["cluster.gpus_per_node=17"], r"trainer\.prompts_per_update=8 pairs have 2 responses each"),
        (["actor.moe.router_replay=engine"], r"policy_loss\.name=dpo samples nothing"),
        (["preference.center_rewards_coefficient=0.1"], r"has no effect; set trainer\.objective=reward_model"),
        (["preference.loss=robust"], r"preference\.loss=robust needs .* set preference\.label_smoothing above 0"),
        (["preference.loss=ipo", "preference.label_smoothing=0.1"], r"label_smoothing=0\.1 has no effect with .*ipo"),
        (["preference.loss=ipo", "preference.target_margin=0.1"], r"target_margin=0\.1 has no effect with .*ipo"),
        (
            ["preference.loss=hinge", "preference.label_smoothing=0.1"],
            r"label_smoothing=0\.1 has no effect with .*hinge",
        ),
    ],
)
def test_objective_dpo_rejects_contradictions(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_keys(load_config(base, [*DPO, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["preference.beta=0.2"], r"preference\.beta=0\.2 has no effect; set trainer\.objective=dpo"),
        (["algorithm.policy_loss.name=dpo"], r"algorithm\.policy_loss\.name=dpo needs trainer\.objective=dpo"),
        (["trainer.objective=kto"], r"trainer\.objective=kto must be one of rl, sft, dpo, reward_model"),
    ],
)
def test_other_objectives_reject_keys_of_pairs(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_keys(load_config(base, overrides))


def test_objective_reward_model_selects_its_loss_without_reference(base: str) -> None:
    config = load_config(base, [*SCORES, "preference.center_rewards_coefficient=0.01", "checkpoint.keep_best=3"])
    validate_keys(config)
    assert config.algorithm.policy_loss.name == "reward_model"
    assert not has_reference(config)
    assert responses_per_prompt(config) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["preference.beta=0.2"], r"preference\.beta=0\.2 has no effect; set trainer\.objective=dpo"),
        (["preference.target_margin=1"], r"preference\.target_margin=1.* has no effect; set trainer\.objective=dpo"),
        (["reference.hf_path=x"], r"reference\.hf_path=x has no effect; trainer\.objective=reward_model has no refer"),
        (["trainer.update_epochs=2"], r"one update per step.*update_epochs=2"),
        (["actor.mtp_loss_coefficient=0.1"], r"mtp_loss_coefficient=0\.1 would train"),
        (["actor.logprob_chunk_tokens=7"], r"actor\.logprob_chunk_tokens=7 has no effect .* predicts no tokens"),
        (
            ["model.dtype=bfloat16", "model.float32_head=true"],
            r"model\.float32_head=True has no effect .* predicts no t",
        ),
        (["actor.moe.router_replay=policy"], r"actor\.moe\.router_replay=policy has no effect .* predicts no tokens"),
        (["trainer.export_adapter=x", "actor.lora.rank=4"], r"trainer\.export_adapter=x has no effect"),
        (["model.check_logits=always"], r"model\.check_logits=always compares log-probabilities"),
        (["actor.lora.rank=4", "actor.strategy=fsdp2"], r"actor\.lora\.rank=4 is not supported .* sharded"),
        (["cluster.gpus_per_node=17"], r"trainer\.prompts_per_update=8 pairs have 2 responses each"),
    ],
)
def test_objective_reward_model_rejects_contradictions(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_keys(load_config(base, [*SCORES, *overrides]))


def test_reference_exists_unless_the_rewards_have_none(base: str) -> None:
    assert not has_reference(load_config(base))
    assert has_reference(load_config(base, DPO))
    assert not has_reference(load_config(base, [*DPO, "preference.reference_free=true"]))
    assert has_reference(load_config(base, ["algorithm.kl.in_loss=0.1"]))


def test_responses_per_prompt_follow_the_objective(base: str) -> None:
    sft = ["algorithm.policy_loss.name=sft"]
    counts = [responses_per_prompt(load_config(base, overrides)) for overrides in ([], sft, DPO)]
    assert counts == [8, 1, 2]


def test_objective_sft_keeps_updates_and_aggregation(base: str) -> None:
    overrides = ["trainer.objective=sft", "algorithm.loss_aggregation=seq-mean-token-mean", "data.answer_key=a"]
    config = load_config(base, [*overrides, "trainer.prompts_per_update=16", "trainer.update_epochs=2"])
    validate_keys(config)
    assert config.algorithm.policy_loss.name == "sft"
    assert not has_reference(config)
    assert not is_warm_start(config)
    assert is_warm_start(load_config(base, ["algorithm.policy_loss.name=sft"]))


@pytest.mark.parametrize(
    "key", ["rollout.temperature=0.7", "algorithm.advantage=rloo", "reward.function=none", "preference.beta=0.2"]
)
def test_objective_sft_rejects_keys_without_effect(base: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key.partition('=')[0]}=.* has no effect"):
        validate_keys(load_config(base, ["trainer.objective=sft", key]))
