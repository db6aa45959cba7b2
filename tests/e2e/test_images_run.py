"""Runs on images of prompts and of tools, which train the vision tower: engine and trainer see the same pictures."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from tiny_processor import write_processor

from tests.e2e.runs import ONE_RANK, metrics, records_of, train
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


TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    + vision_tokenizer().chat_template.removesuffix(" {% endfor %}")
    + "{% for c in m.tool_calls or [] %} {{ c.function.name }} {{ c.function.arguments.value }} {% endfor %}"
    "{{ ' w1 ' if m.role == 'assistant' else ' ' }}{% endfor %}"
)
"""Ends turns with the stop token, and shows tools, their calls and images in their answers."""
TOOLS = """
from PIL import Image
from verl.tools.schemas import ToolResponse


def shade(number: int):
    \"""Draws a picture.

    Args:
        number: its brightness
    \"""
    return ToolResponse(text="w9", image=[Image.new("RGB", (16 + 8 * (number % 3), 16), (number, 0, 255 - number))])


class Looker:
    \"""Two turns, with a picture between them that is another one for every response.\"""

    async def run(self, session, prompt):
        first = await session.generate(prompt.token_ids, {"max_response_tokens": 4})
        sample = int(session.id.rpartition(".")[2])
        answer = await session.call("shade", {"number": 40 * sample})
        await session.generate(session.next_prompt([{"role": "tool", "name": "shade", "content": answer.content}]))
"""


def image_task(task: Path, directory: Path, model_type: str) -> tuple[Path, Path]:
    """Return the configuration of a task whose prompts have one or two images, and the model."""
    model = write_tiny_model(directory / "model", model_type, std=0.06, **engine_sizes(model_type))
    write_processor(model, vision_tokenizer(), model_type)
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
    return directory / "config.yaml", model


@pytest.fixture(scope="module")
def images_run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The run directory, and the model that it started from."""
    directory = tmp_path_factory.mktemp("images")
    config, model = image_task(task, directory, "qwen3_vl")
    train(config, directory / "run", *KEYS)
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


@pytest.mark.on_demand  # tests/unit/rollout/episodes/test_tool_images.py; engines: tests/contract/test_vision_engine.py
def test_tool_pictures_follow_the_pictures_of_prompts(task: Path, tmp_path: Path) -> None:
    config, model = image_task(task, tmp_path, "qwen3_vl")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "mine.py").write_text(TOOLS)
    keys = "data.template=auto", "rollout.tool_parser=hermes", "rollout.max_response_tokens=32", "trainer.steps=1"
    code = f"rollout.episode={tmp_path / 'mine.py'}:Looker", f"rollout.tools={tmp_path / 'mine.py'}:shade"
    train(config, tmp_path / "run", *KEYS, *keys, *code)
    row = metrics(tmp_path / "run")[1]
    assert row["episode/failed"] == row["episode/tool_errors"] == 0
    assert row["rollout/logp_diff_max"] < 1e-4
    records = records_of(tmp_path / "run", "step_1")
    assert {record["turns"] for record in records} == {2}
    answers = [next(each for each in record["messages"] if each["role"] == "tool") for record in records]
    assert all(answer["content"][0]["image"].startswith("data:image/jpeg") for answer in answers)
    # Each response of a group has its own picture.
    assert len({json.dumps(answer) for answer in answers}) == len({record["sample"] for record in records}) == 4


@pytest.mark.on_demand
def test_delta_nets_see_the_pictures_of_prompts(task: Path, tmp_path: Path) -> None:
    config, model = image_task(task, tmp_path, "qwen3_5_moe")
    # vLLM's kernels of gated delta nets compute in bfloat16.
    train(config, tmp_path / "run", *KEYS, "model.dtype=bfloat16", "rollout.max_logp_gap=1", "trainer.steps=2")
    with safe_open(model / "model.safetensors", "pt") as tensors:
        num_tensors = len(list(tensors.keys()))
    for row in [metrics(tmp_path / "run")[step] for step in (1, 2)]:
        assert row["weights/tensors_verified"] == num_tensors
        assert row["rollout/logp_diff_mean"] < 0.05
