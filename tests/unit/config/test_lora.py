"""LoRA keys that contradict each other or other keys are rejected by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.config import load_config
from mcore_rl.config.rules.models import uses_lora
from mcore_rl.config.rules.validation import validate, validate_critic
from mcore_rl.errors import ConfigError

ON = ["actor.lora.rank=8"]


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
        (["actor.lora.rank=-1"], r"^actor\.lora\.rank=-1 must be 0 or more"),
        (["actor.lora.alpha=8"], r"^actor\.lora\.alpha=8\.0 has no effect.*set actor\.lora\.rank above 0"),
        (["actor.lora.rslora=true"], r"^actor\.lora\.rslora=True has no effect"),
        (["actor.lora.target_modules=[q_proj]"], r"^actor\.lora\.target_modules=\['q_proj'\] has no effect"),
        (["actor.lora.path=/adapter"], r"^actor\.lora\.path=/adapter has no effect.*or leave .* at null"),
        (["trainer.export_adapter=/out"], r"^trainer\.export_adapter=/out has no effect"),
        ([*ON, "actor.lora.alpha=0"], r"^actor\.lora\.alpha=0\.0 must be above 0"),
        ([*ON, "actor.lora.target_modules=[a,b,a]"], r"^actor\.lora\.target_modules=.* names a module twice"),
        (
            [*ON, "model.random_init=true"],
            r"^model\.random_init=True is not supported with actor\.lora\.rank=8.*to false$",
        ),
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
