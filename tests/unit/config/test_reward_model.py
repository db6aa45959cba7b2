"""A reward model has the keys of a layout and no training keys; a run without any reward is rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.rules.models import uses_reward_model
from mcore_rl.config.rules.validation import validate, validate_reward_model
from mcore_rl.errors import ConfigError

HF = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def base(tmp_path: Path) -> str:
    for name in ("model", "scorer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(HF))
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {{dir: {tmp_path}/run}}\nmodel: {{hf_path: {tmp_path}/model}}\ndata: {{train: t.jsonl}}\n"
        "cluster: {gpus_per_node: 4}\n"
    )
    return str(path)


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
    ("overrides", "message"),
    [
        (["reward.function=none"], r"^reward\.function=none leaves responses without a reward; set reward_model\.hf_"),
        (["reward_model.weight=2"], r"^reward_model\.weight=2\.0 has no effect; set reward_model\.hf_path, or leave"),
        (["reward_model.parallel.tp=2"], r"^reward_model\.parallel\.tp=2 has no effect; set reward_model\.hf_path"),
    ],
)
def test_check_rewards_keys_without_reward_model_are_rejected(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(load_config(base, overrides))


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=1e-3",
        "optimizer.cpu_offload=true",
        "recompute=full",
        "recompute_layers=2",
        "distributed_optimizer=false",
        "overlap_grad_reduce=true",
        "mtp_loss_coefficient=0.1",
        "logprob_chunk_tokens=5",
        "moe.router_replay=policy",
        "moe.aux_loss_coefficient=0.1",
        "offload.grads=true",
        "offload.optimizer=true",
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
        (["reward_model.parallel.tp=3"], r"^reward_model\.parallel\.tp=3.*divide the 4 trainer ranks \(reward_model\."),
        (["reward_model.fp8=some"], r"^reward_model\.fp8=some must be one of"),
        (["reward_model.tokens_per_microbatch=10"], r"^reward_model\.tokens_per_microbatch=10 must be at least"),
        (["reward_model.num_ranks=8"], r"^reward_model\.num_ranks=8, but cluster\.nodes"),
        (["reward_model.hf_path=/nowhere"], r"^reward_model\.hf_path=/nowhere: no config\.json there"),
        (["reward_model.wieght=1"], r"unknown key reward_model\.wieght; did you mean reward_model\.weight\?"),
    ],
)
def test_validate_reward_model_errors_name_its_keys(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):  # noqa: PT012 - as a run does it
        validate(config := load_config(base, [scorer(base), *overrides]))
        validate_reward_model(config)
