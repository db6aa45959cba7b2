"""Runs on pairs prefer the chosen responses of held-out pairs and place no engines. DPO resumes to the same weights; a
reward model resumes in another layout, and its export is a reward model of transformers and of reinforcement learning.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mcore_rl.algorithms import Needs
from mcore_rl.config.models import RewardModelConfig
from mcore_rl.config.roles import ModelRole
from mcore_rl.config.schema import ClusterConfig, ModelConfig
from mcore_rl.preparation.models import reward_model_layout
from tests.e2e.runs import ONE_RANK, metrics, train

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(scope="module")
def pairs(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration of a run on pairs: the chosen responses have more digits than the rejected ones."""
    directory = tmp_path_factory.mktemp("pairs")
    rng = random.Random(5)
    for name, count in (("train", 48), ("val", 10)):
        rows = [
            {
                "prompt": f"{rng.randrange(100)}=",
                "chosen": "".join(rng.choices("0123456789", k=rng.randrange(4, 8))),
                "rejected": "".join(rng.choices("+-*/=", k=rng.randrange(4, 8))),
                "data_source": rng.choice(["a", "b"]),
            }
            for _ in range(count)
        ]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = yaml.safe_load(task.read_text())
    config = {key: whole[key] for key in ("model", "actor", "cluster", "checkpoint") if key in whole}
    config["data"] = {name: str(directory / f"{name}.jsonl") for name in ("train", "val")} | {"template": "plain"}
    config["rollout"] = {"max_prompt_tokens": 16, "max_response_tokens": 12}
    config["run"] = {"dir": str(directory / "run"), "seed": 3}
    config["trainer"] = {"objective": "dpo", "steps": STEPS, "prompts_per_step": 8, "prompts_per_update": 8}
    config["trainer"] |= {"validate_every_steps": 2}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return directory / "config.yaml"


def test_dpo_run_learns_held_out_pairs_and_resumes_exactly(pairs: Path, tmp_path: Path) -> None:
    output = train(pairs, tmp_path / "whole", f"trainer.export_hf={tmp_path / 'whole_hf'}", "checkpoint.keep_last=3")
    assert "engine" not in output
    rows = metrics(tmp_path / "whole")
    # Policy and reference are equal: the rewards are 0, and the loss is log 2.
    assert rows[0]["val/accuracy"] == 0.5
    assert rows[0]["val/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert rows[1]["actor/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert rows[STEPS]["val/accuracy"] >= 0.9
    assert rows[STEPS]["val/margin"] > rows[2]["val/margin"] > 0
    parts = [rows[STEPS][f"val/margin/{name}"] for name in ("a", "b")]
    assert min(parts) <= rows[STEPS]["val/margin"] <= max(parts)
    assert not any(name.startswith(("rollout/", "reward/", "weights/")) for name in rows[STEPS])
    # Two ranks for steps 1 and 2; one rank continues from the checkpoint.
    parts_dir = shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for step in (4, STEPS):
        shutil.rmtree(parts_dir / "checkpoints" / f"step_{step}")
    train(pairs, tmp_path / "parts", f"trainer.export_hf={tmp_path / 'parts_hf'}", *ONE_RANK)
    resumed = metrics(tmp_path / "parts")
    assert resumed[STEPS]["val/loss"] == pytest.approx(rows[STEPS]["val/loss"], rel=1e-3)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("parts_hf", "whole_hf"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        # Another layout adds in another order; Adam's first steps enlarge such differences of small gradients.
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=2e-3)


@pytest.mark.on_demand  # tests/distributed/test_reward_training.py, test_dpo_run
def test_reward_model_run_exports_a_classifier_with_the_same_scores(pairs: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    objective = ("trainer.objective=reward_model", "actor.optimizer.lr=1e-3")
    train(pairs, tmp_path / "run", *objective, "trainer.steps=2")
    exported = tmp_path / "hf"
    output = train(pairs, tmp_path / "run", *objective, f"trainer.export_hf={exported}", *ONE_RANK)
    assert "engine" not in output
    rows = metrics(tmp_path / "run")
    assert rows[STEPS]["val/accuracy"] >= 0.9
    assert rows[STEPS]["val/margin"] > rows[2]["val/margin"] > rows[0]["val/margin"]
    assert "val/chosen_logp" not in rows[STEPS]
    model = AutoModelForSequenceClassification.from_pretrained(exported, experts_implementation="eager").eval()
    assert (model.config.num_labels, model.dtype) == (1, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    held_out = [json.loads(line) for line in (pairs.parent / "val.jsonl").read_text().splitlines()]
    found = []
    for row in held_out:
        texts = [row["prompt"] + row[side] + tokenizer.eos_token for side in ("chosen", "rejected")]
        tokens = [tokenizer(text, return_tensors="pt") for text in texts]
        with torch.no_grad():
            found.append([float(model(each["input_ids"]).logits) for each in tokens])
    chosen, rejected = torch.tensor(found, dtype=torch.float64).unbind(1)
    assert rows[STEPS]["val/chosen_reward"] == pytest.approx(float(chosen.mean()), abs=1e-5)
    assert rows[STEPS]["val/margin"] == pytest.approx(float((chosen - rejected).mean()), abs=1e-5)
    assert rows[STEPS]["val/loss"] == pytest.approx(float(torch.log1p(torch.exp(rejected - chosen)).mean()), abs=1e-5)
    # The checks of the reward model in a run of reinforcement learning.
    layout = reward_model_layout(
        ModelRole.reward_model(RewardModelConfig(hf_path=str(exported)), ModelConfig()),
        ClusterConfig(device="cpu"),
        2,
        "ppo_clip",
        Needs(advantages=True),
    )
    assert layout.dp == 2
