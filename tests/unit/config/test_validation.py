"""Cross-field checks refuse what cannot work, naming the key, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rl.config import load_config, num_trainer_ranks, validate
from mcore_rl.errors import ConfigError

HF = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "max_position_embeddings": 2048,
}


@pytest.fixture
def base(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF))
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {{dir: {tmp_path}/run}}\nmodel: {{hf_path: {tmp_path}/model}}\ndata: {{train: t.jsonl}}\n"
        "cluster: {gpus_per_node: 4}\n"
    )
    return str(path)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["actor.parallel.tp=8"], "cluster.nodes x cluster.gpus_per_node offers 4"),
        (["actor.num_ranks=5"], "actor.num_ranks"),
        (["cluster.gpus_per_node=3", "actor.parallel.tp=2"], "does not divide the 3 trainer ranks"),
        (["trainer.prompts_per_step=32", "trainer.prompts_per_update=5"], "trainer.prompts_per_step"),
        (["algorithm.dynamic_sampling.enable=true", "rollout.samples_per_prompt=1"], "rollout.samples_per_prompt"),
        (["reward.overlong.enable=true", "reward.overlong.buffer_tokens=9999"], "reward.overlong.buffer_tokens"),
        (["rollout.max_response_tokens=4096"], "rollout.max_response_tokens"),
        (["trainer.steps=0"], "trainer.steps"),
        (["rollout.temperature=-1"], "rollout.temperature"),
        (["rollout.top_p=1.5"], "rollout.top_p"),
        (["rollout.engine=trtllm"], "rollout.engine"),
        (["model.dtype=float8"], "model.dtype"),
        (["model.hf_path=/nowhere"], "model.hf_path"),
        (["trainer.prompts_per_step=1", "trainer.prompts_per_update=1", "rollout.samples_per_prompt=2"], "at least 4"),
        (["rollout.tp=4"], "rollout.tp"),
    ],
)
def test_what_cannot_work_is_refused_by_name(base: str, overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(load_config(base, overrides))
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_works_passes_and_writes_nothing(base: str, tmp_path: Path) -> None:
    validate(load_config(base, ["actor.parallel.tp=2", "actor.parallel.ep=2", "trainer.prompts_per_update=16"]))
    assert not (tmp_path / "run").exists()


def test_all_slots_are_trainer_ranks_unless_said_otherwise(base: str) -> None:
    assert num_trainer_ranks(load_config(base, ["cluster.nodes=2"])) == 8
    assert num_trainer_ranks(load_config(base, ["actor.num_ranks=2"])) == 2


def test_a_run_dir_that_is_a_file_is_refused(base: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir"):
        validate(load_config(base, [f"run.dir={tmp_path}/taken"]))
