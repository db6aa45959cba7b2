"""Contradictory keys of the reference and the KL are rejected by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.rules.models import uses_reference
from mcore_rl.config.rules.validation import validate
from mcore_rl.errors import ConfigError

KL = "algorithm.kl"
ADAPTIVE = [f"{KL}.controller=adaptive", f"{KL}.in_reward=0.1", f"{KL}.target=0.02", f"{KL}.horizon=1000"]


@pytest.fixture
def base(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3", **heads}))
    path = tmp_path / "config.yaml"
    path.write_text(f"run: {{dir: {tmp_path}/run}}\nmodel: {{hf_path: {tmp_path}/model}}\ndata: {{train: t.jsonl}}\n")
    return str(path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reference.hf_path=/other"], r"^reference\.hf_path=/other has no effect; set algorithm\.kl\.in_loss or"),
        (["reference.offload=false"], r"^reference\.offload=False has no effect"),
        (["reference.refresh_every_steps=5"], r"^reference\.refresh_every_steps=5 has no effect"),
        ([f"{KL}.in_loss=0.1", "reference.refresh_every_steps=-1"], r"^reference\.refresh_every_steps=-1 must be 0"),
        ([f"{KL}.in_loss=-0.1"], r"^algorithm\.kl\.in_loss=-0\.1 must be 0 or more"),
        ([f"{KL}.in_reward=-0.1"], r"^algorithm\.kl\.in_reward=-0\.1 must be 0 or more"),
        ([f"{KL}.in_loss=0.1", f"{KL}.loss_kind=k4"], r"^algorithm\.kl\.loss_kind=k4 must be one of k1, abs"),
        ([f"{KL}.in_reward=0.1", f"{KL}.loss_kind=abs"], r"^algorithm\.kl\.loss_kind=abs.*set algorithm\.kl\.in_loss"),
        ([f"{KL}.in_loss=0.1", f"{KL}.reward_kind=k3"], r"^algorithm\.kl\.reward_kind=k3.*algorithm\.kl\.in_reward"),
        ([f"{KL}.in_reward=0.1", f"{KL}.target=0.1"], r"^algorithm\.kl\.target=0\.1 has no.*controller=adaptive"),
        ([f"{KL}.in_reward=0.1", f"{KL}.horizon=9"], r"^algorithm\.kl\.horizon=9 has no.*controller=adaptive"),
        ([*ADAPTIVE, f"{KL}.in_reward=0"], r"set algorithm\.kl\.in_reward to an initial value above 0"),
        ([*ADAPTIVE, f"{KL}.target=null"], r"needs algorithm\.kl\.target above 0, not null"),
        ([*ADAPTIVE, f"{KL}.horizon=0"], r"^algorithm\.kl\.horizon=0 must be at least 1, or null"),
        ([f"{KL}.controller=pid"], r"^algorithm\.kl\.controller=pid must be one of fixed, adaptive"),
    ],
)
def test_contradictory_keys_are_rejected_by_name(base: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(load_config(base, overrides))


def test_uses_reference_any_coefficient_needs_one(base: str) -> None:
    assert not uses_reference(load_config(base, []).algorithm.kl)
    used = (["algorithm.kl.in_loss=0.01"], ["algorithm.kl.in_reward=0.01", "algorithm.kl.reward_kind=k2"], ADAPTIVE)
    for overrides in used:
        config = load_config(base, [*overrides, "reference.refresh_every_steps=3", "reference.offload=false"])
        validate(config)
        assert uses_reference(config.algorithm.kl)
