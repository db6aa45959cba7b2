"""Runs with a reward model: with a reward function and the policy's tokens, and alone with its own tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.runs import metrics, train
from tests.tiny_models import write_tiny_classifier

pytestmark = pytest.mark.slow

RULE_WEIGHT, SCORE_WEIGHT = 0.5, 2.0
SMALL = ("trainer.steps=2", "checkpoint.every_steps=1", "reward.overlong.enable=false", "data.val_max_prompts=4")
TEMPLATE = "{% for m in messages %}{{ '?' if m.role == 'user' else '=' }}{{ m.content }}\n{% endfor %}"
TOLERANCE = 1e-4  # scores are about 1, in float32 on both sides; a different last token changes them by 0.1


def write_scorer(task: Path, name: str, template: str | None) -> Path:
    """Write a dense classification model with the policy's tokenizer and an optional chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task.parent / "model")
    directory = write_tiny_classifier(task.parent / name, "qwen3", vocab_size=len(tokenizer))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


def expected_scores(scorer: Path, sequences: list[list[int]]) -> list[float]:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        scorer, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    with torch.no_grad():
        return [float(model(torch.tensor(ids)[None]).logits[0, 0]) for ids in sequences]


def records_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "rollouts" / f"{name}.jsonl").read_text().splitlines()]


def digits_share(text: str) -> float:
    """Return the score of the task's reward function."""
    return sum(c.isdigit() for c in text) / len(text) if text else 0.0


@pytest.fixture(scope="module")
def beside_a_rule(task: Path) -> tuple[str, ...]:
    scorer = write_scorer(task, "scorer", None)
    return (
        *SMALL,
        f"reward_model.hf_path={scorer}",
        f"reward_model.weight={SCORE_WEIGHT}",
        f"reward.weight={RULE_WEIGHT}",
        "reward_model.offload.params=true",
        "actor.offload.params=true",  # engines and ranks alternate on the device
    )


@pytest.fixture(scope="module")
def run_beside_a_rule(task: Path, beside_a_rule: tuple[str, ...]) -> Path:
    train(task, task.parent / "scored", *beside_a_rule)
    return task.parent / "scored"


@pytest.mark.parametrize("name", ["step_1", "step_2", "val_step_2"])
def test_records_have_the_rule_and_transformers_score_of_the_tokens(run_beside_a_rule: Path, name: str) -> None:
    from transformers import AutoTokenizer

    scorer = run_beside_a_rule.parent / "scorer"
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    whole = []
    for record in records_of(run_beside_a_rule, name):
        rule = digits_share(record["response"])
        reward = RULE_WEIGHT * rule + SCORE_WEIGHT * record["scores"]["model"]
        assert record["reward"] == pytest.approx(reward, abs=1e-5)
        assert record["accuracy"] == float(rule > 0.4)
        ids = tokenizer(record["response"])["input_ids"]
        ids += [tokenizer.eos_token_id] if record["finish_reason"] == "stop" else []
        if len(ids) == record["tokens"]:  # special tokens of a random model are missing in the text
            whole.append((record["scores"]["model"], tokenizer(record["prompt"])["input_ids"] + ids))
    assert len(whole) >= 3
    expected = expected_scores(scorer, [ids for _, ids in whole])
    assert max(abs(score - wanted) for (score, _), wanted in zip(whole, expected, strict=True)) <= TOLERANCE


def test_figures_and_timeline_show_the_reward_model(run_beside_a_rule: Path) -> None:
    rows = metrics(run_beside_a_rule)
    for step in (1, 2):
        scores = [record["scores"]["model"] for record in records_of(run_beside_a_rule, f"step_{step}")]
        assert rows[step]["reward/model"] == pytest.approx(sum(scores) / len(scores), abs=1e-5)
    assert "time/reward_model" in (run_beside_a_rule / "metrics.jsonl").read_text()
    events = json.loads((run_beside_a_rule / "timeline.json").read_text())
    tracks = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"reward model rank 0", "reward model rank 1"} < tracks


@pytest.mark.on_demand
def test_alone_it_reads_the_conversation_in_its_own_template(task: Path) -> None:
    from transformers import AutoTokenizer

    run_dir, scorer = task.parent / "scored_alone", write_scorer(task, "chat_scorer", TEMPLATE)
    layout = (f"reward_model.hf_path={scorer}", "reward_model.parallel.tp=2", "trainer.validate_before=false")
    train(task, run_dir, *SMALL, *layout, "trainer.steps=1", "reward.function=none")
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    for name in ("step_1", "val_step_1"):
        records = records_of(run_dir, name)
        conversations = [
            [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["response"]}] for r in records
        ]
        ids = [tokenizer.apply_chat_template(each, return_dict=False) for each in conversations]
        for record, expected in zip(records, expected_scores(scorer, ids), strict=True):
            assert record["scores"]["model"] == pytest.approx(expected, abs=TOLERANCE)
            assert record["reward"] == record["accuracy"] == record["scores"]["model"]
