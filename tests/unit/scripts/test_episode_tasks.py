"""The demo's tasks of several turns: what the warm start teaches is what the run's episodes look like."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import demo_task
import episode_tasks
import pytest

from mcore_rl.config.functions import load_function
from mcore_rl.data.chat.conversation import Conversation
from mcore_rl.data.chat.template import TemplateFacts, examine
from mcore_rl.rewards.math_grader import is_correct
from mcore_rl.rollout.tools.parsers import ToolCall, ToolCallParser
from mcore_rl.rollout.tools.schemas import schema_of_function
from mcore_rl.types import Prompt

CALCULATOR = "configs/demos/calculator.py:calculator"


@pytest.fixture(scope="module")
def calculator() -> Any:
    return load_function("rollout.tools", CALCULATOR)


@pytest.fixture(scope="module", params=["tool", "game"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp("demo") / str(request.param)
    assert demo_task.prepare(directory, request.param)
    return str(request.param), directory


def test_the_tokenizer_read_back_knows_every_text_and_every_id_of_the_model(prepared: tuple[str, Path]) -> None:
    from transformers import AutoTokenizer

    name, directory = prepared
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    assert len(tokenizer) == json.loads((directory / "model/config.json").read_text())["vocab_size"]
    texts = [p.prompt + p.target for split in demo_task.problems(name).values() for p in split]
    for text, ids in zip(texts, tokenizer(texts)["input_ids"], strict=True):
        assert tokenizer.unk_token_id not in ids, text
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"]) == texts


@pytest.mark.parametrize("name", ["tool", "game"])
def test_what_is_validated_is_trained_nowhere_and_problems_depend_on_the_seed_alone(name: str) -> None:
    splits = demo_task.problems(name)
    asked = {split: {(p.prompt, p.answer) for p in problems} for split, problems in splits.items()}
    assert len(asked["val"]) == 256
    assert not asked["val"] & asked["train"]
    begun = {
        (p.prompt.split("<")[0].removeprefix("[calculator]").split("?")[0], p.answer) for p in splits["warm_start"]
    }
    assert not {(prompt.split("?")[0], answer) for prompt, answer in asked["val"]} & begun
    assert demo_task.problems(name, 3) == demo_task.problems(name, 3)
    assert demo_task.problems(name, 3) != demo_task.problems(name, 4)


def test_calls_of_the_warm_start_are_calls_and_what_follows_is_the_templates_rendering(calculator: Any) -> None:
    schema = schema_of_function(CALCULATOR, calculator)
    tokenizer = episode_tasks.tool_tokenizer()
    talk = Conversation(tokenizer, [schema], [tokenizer.eos_token_id])
    assert examine(talk, tools=True, users=False) == TemplateFacts()
    parser = ToolCallParser("auto", tokenizer.chat_template, [schema])
    calls = answers = 0
    for problem in demo_task.problems("tool")["warm_start"][:2000]:
        question, _, after = problem.prompt.removeprefix("[calculator]").partition(episode_tasks.CALL)
        prompt = talk.whole([{"role": "user", "content": question}])
        if after:
            answers += 1
            target = f"{episode_tasks.CALL}{question.rstrip('=')}{episode_tasks.CALLED}"
            sampled = [*tokenizer(target)["input_ids"], tokenizer.eos_token_id]
            new = talk.after([{"role": "tool", "name": "calculator", "content": problem.answer}], sampled[-1])
            assert tokenizer(problem.prompt)["input_ids"] == prompt + sampled + new
            assert problem.target == f"#{problem.answer}"
        else:
            assert tokenizer(problem.prompt)["input_ids"] == prompt
        if problem.target.startswith(episode_tasks.CALL):
            calls += 1
            (call,) = parser.parse(problem.target).calls
            assert isinstance(call, ToolCall)
            assert calculator(**call.arguments) == problem.answer
        elif not after:
            assert is_correct(problem.target, problem.answer) == (problem.target == f"#{problem.answer}")
    assert calls > 300
    assert answers > 300


def test_the_calculator_refuses_what_is_no_product(calculator: Any) -> None:
    assert calculator("999*999") == "998001"
    for expression in ("2+2", "__import__('os')*1", "1*2*3", "9999999999*1"):
        with pytest.raises(ValueError, match="not two whole numbers"):
            calculator(expression)


def test_the_game_answers_as_the_warm_start_shows_and_rewards_the_number() -> None:
    game = load_function("rollout.environment", "configs/demos/guessing.py:GuessingGame")
    tokenizer = episode_tasks.game_tokenizer()
    talk = Conversation(tokenizer, [], [tokenizer.eos_token_id])
    for problem in demo_task.problems("game")["warm_start"][:500]:
        question, _, history = problem.prompt.partition("?")
        row = Prompt(0, None, "", "", problem.answer, {}, [{"role": "user", "content": f"{question}?"}])  # type: ignore
        playing = game(prompt=row)
        messages = list(row.messages)
        for guess, answer in re.findall(r"(\d+)<eos>([<>])", history):
            assert playing.step(guess) == (answer, -0.1, False)
            messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": answer}]
        assert tokenizer(problem.prompt)["input_ids"] == talk.whole(messages)
        assert playing.step(problem.answer) == ("<", 1.0, True)
        assert playing.score() == {"score": 0.0, "acc": 1.0}
    lost = game(prompt=row)
    assert lost.step("63" if lost.high < 63 else "0")[1:] == (-1.0, True)
    assert lost.step("x")[1:] == (-1.0, True)
    assert lost.score()["acc"] == 0.0
