"""Tasks of the demo with several turns: the targets of the warm start match the episodes of the run."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import demo_task
import episode_tasks
import pytest

from mcore_rl.config import load_config
from mcore_rl.config.functions import load_function
from mcore_rl.data.chat.conversation import Conversation
from mcore_rl.data.chat.template import TemplateFacts, examine
from mcore_rl.rewards.math_grader import is_correct
from mcore_rl.rollout.tools.parsers import ToolCall, ToolCallParser
from mcore_rl.rollout.tools.schemas import schema_of_function

CALCULATOR = "configs/demos/calculator.py:calculator"


@pytest.fixture(scope="module")
def calculator() -> Any:
    return load_function("rollout.tools", CALCULATOR)


def test_no_product_that_is_validated_is_trained() -> None:
    splits = demo_task.problems("tool")
    asked = {split: {p.prompt.removeprefix("[calculator]").split("<")[0] for p in splits[split]} for split in splits}
    assert len(asked["val"]) == 256
    assert not asked["val"] & (asked["train"] | asked["warm_start"])


def test_a_game_is_asked_for_in_the_same_words_whatever_the_number() -> None:
    splits = demo_task.problems("game")
    assert {p.prompt for split in splits.values() for p in split} == {"0-14?"}
    times = Counter(p.answer for p in splits["val"])
    assert set(times) == set(map(str, range(15)))
    assert set(times.values()) == {17, 18}


def test_warm_start_calls_parse_and_match_the_rendered_template(calculator: Any) -> None:
    schema = schema_of_function(CALCULATOR, calculator)
    tokenizer = episode_tasks.tool_tokenizer()
    talk = Conversation(tokenizer, [schema], [tokenizer.eos_token_id])
    assert examine(talk, tools=True, users=False) == TemplateFacts()
    parser = ToolCallParser("auto", tokenizer.chat_template, [schema])
    calls = answers = 0
    for problem in demo_task.problems("tool")["warm_start"][:2000]:
        question, _, after = problem.prompt.removeprefix("[calculator]").partition(episode_tasks.CALL)
        prompt = talk.prompt_ids([{"role": "user", "content": question}])
        if after:
            answers += 1
            target = f"{episode_tasks.CALL}{question.rstrip('=')}{episode_tasks.CALLED}"
            sampled = [*tokenizer(target)["input_ids"], tokenizer.eos_token_id]
            new = talk.ids_after_turn([{"role": "tool", "name": "calculator", "content": problem.answer}], sampled[-1])
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


@pytest.fixture(scope="module")
def game() -> Any:
    return load_function("rollout.environment", "configs/demos/guessing.py:GuessingGame")


def asked(number: str) -> Any:
    """Return a row of the game in the form that an episode receives."""
    return SimpleNamespace(ground_truth=number, messages=[{"role": "user", "content": episode_tasks.RANGE}])


def test_warm_start_games_match_the_game_and_the_template(game: Any) -> None:
    tokenizer = episode_tasks.game_tokenizer()
    talk = Conversation(tokenizer, [], [tokenizer.eos_token_id])
    won = 0
    for problem in demo_task.problems("game")["warm_start"][:500]:
        row = asked(problem.answer)
        playing = game(prompt=row, guesses=str(episode_tasks.GUESSES))
        *before, last = problem.target.split("<eos>")
        messages, said = list(row.messages), ""
        for part in before:
            assert part.startswith(said)
            guess = part.removeprefix(said)
            said, _, done = playing.step(guess)
            assert not done
            messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": said}]
        assert last.startswith(said)
        rendered = [*talk.prompt_ids(messages), *tokenizer(last.removeprefix(said))["input_ids"]]
        assert tokenizer(problem.prompt + problem.target)["input_ids"] == rendered
        assert playing.step(last.removeprefix(said))[2]  # the game ends at the end of the target
        won += playing.won
    assert 100 < won < 300


def test_marked_guesses_are_possible_and_four_find_any_number(game: Any) -> None:
    marked = blind = 0
    middles: dict[tuple[str, ...], str] = {}
    for problem in demo_task.problems("game")["warm_start"]:
        turns = re.findall(r"(!?)(\d+)(?:<eos>([<>]))?", problem.target)
        low, high = 0, 14
        for place, (mark, guess, answer) in enumerate(turns):
            if mark and all(turn[0] for turn in turns[:place]):
                middles[tuple(turn[2] for turn in turns[:place])] = guess
            marked += bool(mark)
            blind += not mark
            assert not mark or low <= int(guess) <= high, problem.target
            low, high = (max(low, int(guess) + 1), high) if answer == ">" else (low, min(high, int(guess) - 1))
    assert 0.1 < marked / (marked + blind) < 0.3  # rewarded marks occur, but rarely
    for number in range(15):
        playing, answers, done = game(prompt=asked(str(number)), guesses="4"), [], False
        while not done:
            answer, reward, done = playing.step(f"!{middles[tuple(answers)]}")
            assert reward >= 0
            answers.append(answer)
        assert playing.won


def total(playing: Any, actions: list[str]) -> float:
    """Return the sum of the rewards of these actions."""
    rewards = []
    for action in actions:
        _, reward, done = playing.step(action)
        rewards.append(reward)
        if done:
            break
    return sum(rewards) + playing.score()["score"]


def test_the_number_pays_what_was_ruled_out_costs_and_giving_up_never_pays(game: Any) -> None:
    def played(*actions: str) -> float:
        return total(game(prompt=asked("6"), guesses="4"), list(actions))

    assert played("6") == played("!7", "3", "6") == 1.0
    assert played("7", "8", "6") == played("!7", "!7", "6") == 0.5
    assert played("7", "3", "5", "4") == -0.5
    worst = played("99", "99", "99", "99")
    for given_up in ([], ["x"], [""], ["6!"], ["!"], ["-6"]):  # []: the turn was truncated
        assert played(*given_up) <= worst
        assert played("7", *given_up) < played("7", "3", "4", "5")


def test_a_game_is_right_when_the_number_was_found_in_time(game: Any) -> None:
    playing = game(prompt=asked("6"), guesses="2")
    assert playing.step("3") == (">", 0.0, False)
    assert playing.step("!7") == ("<", 0.0, True)
    assert playing.score() == {"score": 0.0, "acc": 0.0}
    playing = game(prompt=asked("6"), guesses="2")
    assert playing.step("!6") == ("", 1.0, True)
    assert playing.score() == {"score": 0.0, "acc": 1.0}


def test_the_configuration_plays_as_many_guesses_as_the_warm_start_shows() -> None:
    config = load_config("configs/demo_game_cpu.yaml", [])
    assert config.rollout.max_turns == int(config.rollout.episode_kwargs["guesses"]) == episode_tasks.GUESSES
