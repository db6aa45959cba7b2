"""A supervised run on conversations of several turns: the validation loss equals transformers' cross-entropy of the
exported model over the turns of the assistant."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.distributed.policy_batch import reference_model
from tests.e2e.runs import metrics, train

pytestmark = pytest.mark.slow

STEPS = 6
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def conversations(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration of a run on conversations of one to three turns."""
    directory = tmp_path_factory.mktemp("conversations")
    whole = yaml.safe_load(task.read_text())
    model = shutil.copytree(whole["model"]["hf_path"], directory / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rng = random.Random(5)
    for name, count in (("train", 40), ("val", 11)):
        rows = []
        for _ in range(count):
            turns = [(rng.randrange(10), rng.randrange(1, 4)) for _ in range(rng.randrange(1, 4))]
            messages = [
                {"role": role, "content": text}
                for digit, length in turns
                for role, text in (("user", f"{digit}="), ("assistant", str(digit) * length))
            ]
            rows.append({"messages": messages, "data_source": rng.choice(["a", "b"])})
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {key: whole[key] for key in ("actor", "cluster", "checkpoint") if key in whole}
    config["model"] = whole["model"] | {"hf_path": str(model)}
    config["data"] = {name: str(directory / f"{name}.jsonl") for name in ("train", "val")}
    config["rollout"] = {"max_prompt_tokens": 16, "max_response_tokens": 16}
    config["run"] = {"dir": str(directory / "run"), "seed": 3}
    config["trainer"] = {"objective": "sft", "steps": STEPS, "prompts_per_step": 8, "prompts_per_update": 4}
    config["trainer"] |= {"validate_every_steps": 3}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return directory / "config.yaml"


def cross_entropy(model_path: Path, file: Path) -> dict[str, tuple[float, int]]:
    """Sum of -log p over the turns of the assistant, and number of their tokens, by data_source."""
    from transformers import AutoTokenizer

    model = reference_model(model_path)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    found: dict[str, tuple[float, int]] = {}
    for row in map(json.loads, file.read_text().splitlines()):
        ids: list[int] = []
        trained: list[bool] = []
        for message in row["messages"]:
            says = message["role"] == "assistant"
            new = tokenizer(message["content"], add_special_tokens=False)["input_ids"] + [1] * says
            ids, trained = ids + new, trained + [says] * len(new)
        with torch.no_grad():
            logp = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        chosen = -logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0][torch.tensor(trained[1:])]
        total, count = found.get(row["data_source"], (0.0, 0))
        found[row["data_source"]] = total + float(chosen.sum()), count + len(chosen)
    return found


@pytest.fixture(scope="module")
def whole(conversations: Path) -> Path:
    """Run directory of all steps. Beside it: `exported` with its final weights."""
    directory = conversations.parent
    output = train(conversations, directory / "run", f"trainer.export_hf={directory / 'exported'}")
    assert "engine" not in output
    return directory / "run"


def test_sft_run_validation_loss_equals_cross_entropy(conversations: Path, whole: Path) -> None:
    exported = whole.parent / "exported"
    rows = metrics(whole)
    assert rows[STEPS]["val/loss"] < 0.8 * rows[0]["val/loss"]
    for model, step in ((conversations.parent / "model", 0), (exported, STEPS)):
        sums = cross_entropy(model, conversations.parent / "val.jsonl")
        total, count = (sum(column) for column in zip(*sums.values(), strict=True))
        # Float32 against float64.
        assert rows[step]["val/loss"] == pytest.approx(total / count, rel=1e-5)
        for name, (part, tokens) in sums.items():
            assert rows[step][f"val/loss/{name}"] == pytest.approx(part / tokens, rel=1e-5)


@pytest.mark.on_demand  # test_dpo_run resumes too
def test_sft_run_resumes_to_the_same_loss(conversations: Path, whole: Path, tmp_path: Path) -> None:
    """The resumed steps reach the next epoch: 40 conversations are 5 steps."""
    parts = shutil.copytree(whole, tmp_path / "parts")
    shutil.rmtree(parts / "checkpoints" / f"step_{STEPS}")
    output = train(conversations, parts)
    assert re.findall(r"step +(\d)/6", output)[-2:] == ["5", "6"]
    assert "step 4/6" not in output
    found, expected = metrics(parts)[STEPS], metrics(whole)[STEPS]
    assert found["val/loss"] == expected["val/loss"]
    assert found["actor/loss"] == expected["actor/loss"]
