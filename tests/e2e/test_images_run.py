"""A run on prompts with images that trains the vision tower: engine and trainer see the same pictures."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from tiny_processor import write_processor

from tests.e2e.runs import ONE_RANK, metrics, train
from tests.selection import needs_package
from tests.tiny_models import write_tiny_model
from tests.vision_models import engine_sizes, png, vision_tokenizer

pytestmark = [pytest.mark.slow, needs_package("torchvision", "make setup")]

REWARD = """
def even(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    words = [word for word in solution_str.split() if word.startswith("w")]
    return sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)
"""
KEYS = (
    *ONE_RANK,
    *("actor.train_vision=true", "weights.verify_every=1", "trainer.steps=2", "trainer.validate_every_steps=0"),
    *("data.val=null", "rollout.max_prompt_tokens=32", "checkpoint.every_steps=0"),
)


@pytest.fixture(scope="module")
def images_run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run directory, and the model that it started from."""
    directory = tmp_path_factory.mktemp("images")
    model = write_tiny_model(directory / "model", "qwen3_vl", std=0.06, **engine_sizes("qwen3_vl"))
    write_processor(model, vision_tokenizer(), "qwen3_vl")
    rows = []
    for row in range(24):
        prompt, count = ("<image> w5 w6", 1) if row % 2 else ("<image> w7 <image>", 2)
        pictures = [base64.b64encode(png(16, 16, 2 * row + each)).decode() for each in range(count)]
        images = [f"data:image/png;base64,{picture}" for picture in pictures]
        rows.append({"prompt": prompt, "images": images, "answer": "w3"})
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(REWARD)
    config = yaml.safe_load(task.read_text())
    config["data"] |= {"train": str(directory / "train.jsonl")}
    config["model"] |= {"hf_path": str(model)}
    config["reward"] |= {"function": f"{directory / 'reward.py'}:even"}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    train(directory / "config.yaml", directory / "run", *KEYS)
    return directory / "run", model


def test_engine_and_trainer_agree_on_pictures_and_the_tower_is_sent(images_run: tuple[Path, Path]) -> None:
    run, model = images_run
    with safe_open(model / "model.safetensors", "pt") as tensors:
        num_tensors = len(list(tensors.keys()))
    rows = [metrics(run)[step] for step in (1, 2)]
    for row in rows:
        assert row["weights/tensors_verified"] == num_tensors
        assert row["rollout/logp_diff_max"] < 1e-4
        assert row["actor/grad_norm_vision"] > 0


def test_records_contain_the_pictures_of_each_prompt(images_run: tuple[Path, Path]) -> None:
    run, _ = images_run
    lines = [line for file in sorted((run / "rollouts").glob("*.jsonl")) for line in file.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    shown = [record["images"] for record in records if "images" in record]
    assert {len(images) for images in shown} == {1, 2}
    assert all(image.startswith("data:image/") for images in shown for image in images)
