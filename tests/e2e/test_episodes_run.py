"""A run with episodes on real engines: turns, tool processes, branches, failures, and the update."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.runs import ONE_RANK, metrics, records_of, train

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
USERS = '''
def double(number: int) -> str:
    """Doubles a number.

    Args:
        number: a whole number
    """
    return str(2 * number)


class Solver:
    """Two turns with a tool's answer between them; of each group the second response branches, the third fails."""

    async def run(self, session, prompt):
        sample = int(session.id.rpartition(".")[2])
        first = await session.generate(prompt.token_ids, {"max_response_tokens": 4, "temperature": 0.4})
        session.reward(0.125)
        if sample == 2:
            raise LookupError("nothing known")
        answer = await session.call("double", {"number": sample + 20})
        assert answer.error is None, answer
        options = {"stop": list("0123456789")} if sample == 3 else None
        second = await session.generate(prompt.token_ids + first.token_ids + session.encode(answer.text), options)
        if sample == 1:
            await session.generate(prompt.token_ids, {"max_response_tokens": 3})
        length = len(second.token_ids)
        return {"score": length / 8, "acc": second.finish_reason == "stop", "second": length, "said": second.text}
'''


@pytest.fixture(scope="module")
def episodes_run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of two steps with router replay from the engine and per-token advantages."""
    directory = tmp_path_factory.mktemp("episodes")
    (directory / "mine.py").write_text(USERS)
    tokenizer = directory / "tokenizer"
    model = Path(yaml.safe_load(task.read_text())["model"]["hf_path"])
    shutil.copytree(model, tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    rows = [json.loads(line) for line in (task.parent / "train.jsonl").read_text().splitlines()]
    rows = [row | ({"sampling": {"temperature": 1.7}} if number % 2 else {}) for number, row in enumerate(rows)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(
        task,
        directory / "run",
        *ONE_RANK,
        f"data.train={directory / 'train.jsonl'}",
        f"model.tokenizer_path={tokenizer}",
        "data.template=auto",
        f"rollout.episode={directory / 'mine.py'}:Solver",
        f"rollout.tools={directory / 'mine.py'}:double",
        "rollout.tool_parser=hermes",
        "rollout.failed_reward=-0.5",
        "actor.moe.router_replay=engine",
        "algorithm.advantage=reinforce_plus_plus",
        "algorithm.dynamic_sampling.enable=false",
        "reward.overlong.enable=false",
        "trainer.steps=2",
        "trainer.validate_every_steps=0",
        "trainer.validate_before=false",
    )
    return directory / "run"


def test_ranks_recompute_the_logp_of_every_sampled_token(episodes_run: Path) -> None:
    """This checks all token positions: a shift by one token changes log-probabilities by nats."""
    for step in (1, 2):
        assert metrics(episodes_run)[step]["rollout/logp_diff_max"] < 1e-4


def test_records_have_turns_masks_and_what_was_said(episodes_run: Path) -> None:
    records = records_of(episodes_run, "step_1")
    by_sample: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        by_sample.setdefault(record["sample"], []).append(record)
    assert {sample: len(of_sample) for sample, of_sample in by_sample.items()} == {0: 8, 1: 16, 2: 8, 3: 8}
    for record in records:
        assert len(record["mask"]) == record["tokens"]
        spans = [[start, end] for _, start, end in record["versions"]]
        sampled = [0] * record["tokens"]
        for start, end in spans:
            sampled[start:end] = [1] * (end - start)
        if record["sample"] == 2:
            assert (record["reward"], sum(record["mask"]), record["finish_reason"]) == (-0.5, 0, "error")
            assert record["error"] == "the episode failed: it raised LookupError: nothing known"
            continue
        assert record["mask"] == sampled
        assert record["reward"] == pytest.approx(0.125 + record["second"] / 8)
        assert record["tool_calls"] == 1
        assert record["turns"] == (3 if record["sample"] == 1 else 2)
    two_turns = [r for r in records if r["sample"] == 0]
    for record in two_turns:
        first = next(i for i, token in enumerate(record["mask"]) if not token)
        assert record["mask"][first : first + 2] == [0, 0], "two characters of the tool's answer"
        assert sum(record["mask"]) == record["tokens"] - 2
        assert record["turn_rewards"] == [[first - 1, 0.125]]


def test_records_have_the_temperature_of_every_token(episodes_run: Path) -> None:
    """Temperatures come from calls, rows, and the run. Tool output has none."""
    seen = set()
    for record in records_of(episodes_run, "step_1"):
        if record["sample"] in (0, 3):
            (first, start, end), (second, begin, last) = record["temperatures"]
            assert (first, start, last) == (0.4, 0, record["tokens"])
            assert record["mask"][end:begin] == [0, 0]
            seen.add(second)
    assert seen == {1.0, 1.7}


def test_a_stop_string_ends_the_turn_with_its_token(episodes_run: Path) -> None:
    """The stop digit is a token of the sequence but is cut from the text for graders."""
    stopped = [record for record in records_of(episodes_run, "step_1") if record["sample"] == 3]
    assert not any(character.isdigit() for record in stopped for character in record["said"])
    assert any(record["accuracy"] == 1 and len(record["said"]) == record["second"] - 1 for record in stopped)
    assert any(
        character.isdigit() for record in records_of(episodes_run, "step_1") for character in record.get("said", "")
    )


def test_figures_count_episodes_and_their_failures(episodes_run: Path) -> None:
    first = metrics(episodes_run)[1]
    assert first["episode/failed"] == 0.25
    assert first["episode/tool_calls"] == 0.75
    assert first["episode/turns"] == pytest.approx((2 + 3 + 1 + 2) / 4)
    assert first["reward/errors"] == 8
    records = records_of(episodes_run, "step_1")
    first_of_episode = {(r["group"], r["sample"]): r for r in reversed(records)}
    assert first["reward/mean"] == pytest.approx(sum(r["reward"] for r in first_of_episode.values()) / 32)
    assert first["actor/grad_norm"] > 0
