"""A run whose only reward is a reward model with a chat template and a tokenizer of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.runs import records_of, train
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


def digits_share(text: str) -> float:
    """Return the score of the task's reward function."""
    return sum(c.isdigit() for c in text) / len(text) if text else 0.0


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
