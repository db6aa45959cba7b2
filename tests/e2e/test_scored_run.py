"""PPO with a critic, a reference, a reward model, a judge and a reward function in one run.

The scores of the reward model and the judge's answers equal transformers' output for the same weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.runs import metrics, records_of, train
from tests.e2e.test_judge_run import ANSWER_TOKENS, PARSER, QUESTION_TOKENS, write_judge
from tests.e2e.test_judge_run import OVERRIDES as JUDGED
from tests.e2e.test_reward_model_run import (
    RULE_WEIGHT,
    SCORE_WEIGHT,
    TOLERANCE,
    digits_share,
    expected_scores,
    write_scorer,
)

pytestmark = pytest.mark.slow

# The policy has two data-parallel ranks (experts over both), the critic one rank.
PPO = (
    "algorithm.advantage=gae",
    "algorithm.lam=0.95",
    "algorithm.kl.in_loss=0.01",
    "algorithm.kl.in_reward=0.05",
    "algorithm.kl.controller=adaptive",
    "algorithm.kl.target=0.01",
    "algorithm.kl.horizon=100",
    "critic.num_ranks=1",
    "critic.optimizer.lr=1e-3",
    "trainer.critic_warmup_steps=1",
)
JUDGE_WEIGHT, UNPARSABLE, STEPS = 0.25, -3, 3
"""The weight and the score of unparsable answers in JUDGED, and the number of steps of the run."""


@pytest.fixture(scope="module")
def scored_run(task: Path) -> Path:
    """Directory of a run whose engines, ranks and judges alternate on their devices."""
    directory = task.parent / "scored"
    (task.parent / "parser.py").write_text(PARSER)
    train(
        task,
        directory,
        *JUDGED,
        *PPO,
        f"trainer.steps={STEPS}",
        f"judge.parser={task.parent / 'parser.py'}:last_digit",
        f"judge.hf_path={write_judge(task.parent / 'judge')}",
        "judge.num_engines=1",
        f"reward_model.hf_path={write_scorer(task, 'scorer', None)}",
        f"reward_model.weight={SCORE_WEIGHT}",
        "reward_model.num_ranks=1",
        "reward_model.offload.params=true",
        "actor.offload.params=true",
    )
    return directory


@pytest.fixture(scope="module")
def transformers_answer(scored_run: Path) -> Callable[[dict[str, Any]], tuple[list[int], str, bool]]:
    """Return a function from a record to the question, transformers' greedy answer, and whether the answer was cut."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    judge = scored_run.parent / "judge"
    tokenizer = AutoTokenizer.from_pretrained(judge)
    model = AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32, attn_implementation="eager").eval()

    def answer(record: dict[str, Any]) -> tuple[list[int], str, bool]:
        content = f"{record['prompt']}{record['response']}|{record['ground_truth']}:"
        messages = [{"role": "user", "content": content}]
        question = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        ids, greedy = torch.tensor([question]), {"do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_TOKENS, **greedy)
        tokens = whole[0, len(question) :].tolist()
        return question, tokenizer.decode(tokens, skip_special_tokens=True), tokens[-1] != tokenizer.eos_token_id

    return answer


def test_record_has_transformers_answer_and_the_weighted_reward(
    scored_run: Path, transformers_answer: Callable[..., tuple[list[int], str, bool]]
) -> None:
    records = records_of(scored_run, "step_1")
    assert len(records) == 8 * 4
    scores, too_long = [], []
    for record in records:
        question, text, cut = transformers_answer(record)
        (answer,) = record["judge"]
        digits = list(re.finditer("[0-9]", text))
        expected: float | None = float(digits[-1][0]) if digits else None
        if digits and cut and digits[-1].end() == len(text):
            expected = None
        too_long.append(len(question) > QUESTION_TOKENS)
        if too_long[-1]:
            text, expected = "", None
            assert f"judge.max_prompt_tokens is {QUESTION_TOKENS}" in answer["error"]
        assert answer["text"] == text
        assert answer["score"] == expected
        scores.append(UNPARSABLE if expected is None else expected)
        rule, given = digits_share(record["response"]), record["scores"]
        assert given["judge"] == scores[-1]
        reward = RULE_WEIGHT * rule + JUDGE_WEIGHT * given["judge"] + SCORE_WEIGHT * given["model"]
        assert record["reward"] == pytest.approx(reward, abs=1e-5)
        assert record["accuracy"] == float(rule > 0.4)
    # Every kind of answer occurs; otherwise parts of the checks above did not run.
    assert len(set(scores) - {UNPARSABLE}) > 1
    assert scores.count(UNPARSABLE) > sum(too_long) > 0
    row = metrics(scored_run)[1]
    assert row["reward/judge"] == pytest.approx(sum(scores) / len(scores))
    assert row["judge/unparsable_fraction"] == scores.count(UNPARSABLE) / len(scores)
    assert row["judge/too_long_fraction"] == sum(too_long) / len(scores)


def test_validation_is_judged(
    scored_run: Path, transformers_answer: Callable[..., tuple[list[int], str, bool]]
) -> None:
    records = records_of(scored_run, f"val_step_{STEPS}")
    assert len(records) == 16
    for record in records:
        question, text, _ = transformers_answer(record)
        assert record["judge"][0]["text"] == (text if len(question) <= QUESTION_TOKENS else "")
    assert not list((scored_run / "rollouts").glob(".*"))


def test_reward_model_score_is_transformers_score_of_the_tokens(scored_run: Path) -> None:
    from transformers import AutoTokenizer

    scorer = scored_run.parent / "scorer"
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    for name in ("step_1", f"step_{STEPS}", f"val_step_{STEPS}"):
        scores, sequences = [], []
        for record in records_of(scored_run, name):
            ids = tokenizer(record["response"])["input_ids"]
            ids += [tokenizer.eos_token_id] if record["finish_reason"] == "stop" else []
            if len(ids) == record["tokens"]:  # special tokens of a random model are missing in the text
                scores.append(record["scores"]["model"])
                sequences.append(tokenizer(record["prompt"])["input_ids"] + ids)
        assert len(scores) >= 3
        assert scores == pytest.approx(expected_scores(scorer, sequences), abs=TOLERANCE)


def test_metrics_and_timeline_show_the_reward_model(scored_run: Path) -> None:
    rows = metrics(scored_run)
    for step in range(1, STEPS + 1):
        scores = [record["scores"]["model"] for record in records_of(scored_run, f"step_{step}")]
        assert rows[step]["reward/model"] == pytest.approx(sum(scores) / len(scores), abs=1e-5)
        # The policy's parameters and the engine's cache (rollout.kv_cache_gib) take turns on the device.
        assert rows[step]["memory/offloaded_bytes"] > 0
        assert rows[step]["memory/engine_released_bytes"] > 0.9 * 0.03 * 2**30
    assert "time/reward_model" in (scored_run / "metrics.jsonl").read_text()
    events = json.loads((scored_run / "timeline.json").read_text())
    tracks = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"reward model rank 0", "critic rank 0"} < tracks


def test_critic_has_metrics_and_the_policy_waits_for_its_warmup(scored_run: Path) -> None:
    rows = metrics(scored_run)
    for step in range(1, STEPS + 1):
        row = rows[step]
        assert {"critic/loss", "critic/explained_variance", "critic/grad_norm", "returns/mean"} <= row.keys()
        # Advantages are whitened over all tokens of the step.
        assert abs(row["advantages/mean"]) < 1e-5
        assert row["advantages/abs_max"] > 0.5
    assert rows[3]["critic/trained_tokens"] == rows[3]["actor/trained_tokens"]
    assert [("actor/loss" in rows[step]) for step in (1, 2, 3)] == [False, True, True]
    # The policy differs from the reference after its first update, in step 2, and the coefficient adapts.
    assert rows[1]["reward/kl"] == rows[2]["reward/kl"] == 0
    assert rows[3]["reward/kl"] != 0
    assert rows[3]["actor/kl_reference"] > 0
    assert rows[2]["reward/kl_coefficient"] < rows[1]["reward/kl_coefficient"] == 0.05
