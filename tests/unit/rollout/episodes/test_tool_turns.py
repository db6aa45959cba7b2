"""Model that calls tools: its turns are trained, and each call is answered in order and by its id."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mcore_rl.rollout.episodes.builtin import ToolEpisode
from mcore_rl.rollout.episodes.session import EpisodePrompt, Session
from mcore_rl.rollout.tools.interface import ToolResult
from tests.unit.data.chat import made
from tests.unit.rollout.episodes.conftest import FakeTools, SetUp
from tests.unit.rollout.episodes.scripted import asks_until_it_has_seen, call, echo, once

END = made.CLOSE


def test_tool_episode_trains_sampled_tokens_only(stage: SetUp) -> None:
    tools = FakeTools(echo, rewards={"look": 2.5})
    on = stage(asks_until_it_has_seen(2), ToolEpisode(), tools=tools, extra_info={"tools_kwargs": {"look": {"a": 1}}})
    (outcome,) = on.play()
    turns = [f"now {call('0')}{END}", f"now {call('1')}{END}", f"done after 2{END}"]
    assert on.trained_text(outcome) == "".join(turns)
    answered = "\n<|im_start|>tool\nfound {}<|im_end|>\n<|im_start|>assistant\n"
    assert on.text(outcome) == on.prompt.text + turns[0] + answered.format(0) + turns[1] + answered.format(1) + turns[2]
    (trajectory,) = outcome.trajectories
    assert trajectory.prompt_ids.tolist() == on.prompt.token_ids.tolist()
    assert (trajectory.logp[trajectory.trained > 0] == -trajectory.token_ids[trajectory.trained > 0]).all()
    assert (outcome.turns, outcome.tool_calls, outcome.finish_reason) == (3, 2, "stop")
    rewards = {"tool_rewards": [0.5, 0.5], "episode_rewards_of_tools": {"look": 2.5}}
    assert outcome.extra == {"num_turns": 3, **rewards}
    assert outcome.parts == {"tool_depth": 2.0}
    assert [name for name, *_ in [(c[1], c[2]["q"], c[3]) for c in tools.calls]] == ["look", "look"]
    assert tools.calls[0][3] == {"look": {"a": 1}}
    assert tools.closed == ["train.0.0"]
    assert [message["role"] for message in outcome.messages] == [
        *("user", "assistant", "tool", "assistant", "tool", "assistant")
    ]


def test_tool_episode_sequence_equals_the_rendering(stage: SetUp) -> None:
    """The model writes calls like the template. Oracle: the template."""

    on = stage(once(call("it")), ToolEpisode(), tools=FakeTools(echo))
    (outcome,) = on.play()
    rendered = on.player.context.conversation.render(list(outcome.messages), prompts=False)
    assert on.text(outcome) + "\n" == rendered


def test_tool_episode_answers_use_the_model_call_ids(stage: SetUp) -> None:
    """Oracle: the template, which shows ids. The second call cannot be executed, but is answered."""
    written = '{}functions.look:{}{}{{"q": "{}"}}{}'

    def of(number: int, name: str = "look") -> str:
        return written.format(made.CALL, number, made.ARGUMENTS, f"it{number}", made.CALL_END).replace("look", name)

    def say(text: str) -> str:
        return f"done{END}" if "## Return of" in text else f"{of(4)}{of(5, 'lok')}{of(6)}{END}"

    on = stage(say, ToolEpisode(), tools=FakeTools(echo), template=made.NAMED_CALLS, parser="kimi")
    (outcome,) = on.play()
    parts = on.text(outcome).split("## Return of ")
    assert [part.partition("\n")[0] for part in parts[1:]] == [f"functions.{n}" for n in ("look:4", "lok:5", "look:6")]
    assert "found it4" in parts[1]
    assert "there is no such tool" in parts[2]
    calls = next(message["tool_calls"] for message in outcome.messages if "tool_calls" in message)
    assert [each["id"] for each in calls] == ["functions.look:4", "functions.lok:5", "functions.look:6"]


def test_tool_episode_ids_match_after_an_unreadable_call(stage: SetUp) -> None:
    """The ids are compared in the conversation, which may be rendered again."""
    bad = "<tool_call>\n{]\n</tool_call>"
    on = stage(
        lambda text: f"done{END}" if "found" in text else f"{bad}{call('it')}{END}",
        ToolEpisode(),
        tools=FakeTools(echo),
    )
    (outcome,) = on.play()
    _, turn, refusal, answer, _ = outcome.messages
    (called,) = turn["tool_calls"]
    assert "found it" in answer["content"]
    assert called["id"] == answer["tool_call_id"] != refusal["tool_call_id"]


def test_tool_episode_calls_run_concurrently_in_order(stage: SetUp) -> None:
    started: list[float] = []

    def slow_first(arguments: dict[str, Any]) -> ToolResult | float:
        started.append(time.monotonic())
        return 0.2 if arguments["q"] == "a" else ToolResult("b at once")

    on = stage(once(f"{call('a')}{call('b')}"), ToolEpisode(), tools=FakeTools(slow_first))
    (outcome,) = on.play()
    assert started[1] - started[0] < 0.2
    assert on.text(outcome).index("slept") < on.text(outcome).index("b at once")


UNKNOWN = '<tool_call>\n{"name": "lok", "arguments": {"q": "x"}}\n</tool_call>'
UNFIT = '<tool_call>\n{"name": "look", "arguments": {"q": 3}}\n</tool_call>'
BROKEN = "<tool_call>\n{]\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "said"), [(UNKNOWN, "there is no such tool"), (UNFIT, "was not executed"), (BROKEN, "was not executed")]
)
def test_tool_episode_malformed_call_is_answered_and_counted(stage: SetUp, text: str, said: str) -> None:
    tools = FakeTools(echo)
    on = stage(lambda so_far: f"done{END}" if "Error" in so_far else f"{text}{END}", ToolEpisode(), tools=tools)
    (outcome,) = on.play()
    assert said in on.text(outcome)
    assert (tools.calls, outcome.tool_errors, outcome.turns) == ([], 1, 2)


def test_tool_episode_truncated_turn_executes_no_call(stage: SetUp) -> None:
    tools = FakeTools(echo)
    whole = call("a")
    tokens = len(made.tokenizer(None)(whole)["input_ids"])
    on = stage(lambda text: f"{whole} and more{END}", ToolEpisode(), tools=tools, max_turn_tokens=tokens)
    (outcome,) = on.play()
    assert on.trained_text(outcome) == whole
    assert (outcome.finish_reason, tools.calls) == ("length", [])


def test_tool_episode_calls_beyond_the_limit_get_an_error(stage: SetUp) -> None:
    tools = FakeTools(echo)
    on = stage(once(f"{call('a')}{call('b')}"), ToolEpisode(), tools=tools, max_tool_calls_per_turn=1)
    (outcome,) = on.play()
    assert len(tools.calls) == 1
    assert "a turn may call 1 tools, and this call was not executed" in on.text(outcome)


@pytest.mark.parametrize(
    "calls",
    [
        [call("a"), call("b"), call("c")],
        [UNKNOWN],
        [call("a"), UNFIT, call("b")],
        [BROKEN],
        [BROKEN, call("a")],
        [call("a"), BROKEN, call("b")],
        [call("slow")],
    ],
    ids=["over the limit", "unknown", "unfit", "unreadable", "unreadable first", "unreadable between", "timed out"],
)
def test_new_sequence_history_shows_every_answered_call(stage: SetUp, calls: list[str]) -> None:
    """Oracle: the sampled tokens and answers, which `keep` continues."""

    def answer(arguments: dict[str, Any]) -> ToolResult:
        return ToolResult("Error: timed out", error="late") if arguments["q"] == "slow" else echo(arguments)

    texts = {}
    for history in ("keep", "new_sequence"):
        options = {"tools": FakeTools(answer), "max_tool_calls_per_turn": 2, "history": history}
        on = stage(once("".join(calls)), ToolEpisode(), max_response_tokens=1500, **options)
        (outcome,) = on.play()
        texts[history] = on.text(outcome, len(outcome.trajectories) - 1)
    assert texts["new_sequence"] == texts["keep"]
    assert texts["keep"].count("<|im_start|>tool") == len(calls)


def test_tool_episode_single_call_template_reports_others(stage: SetUp) -> None:
    tools = FakeTools(echo)
    on = stage(
        once(f"{call('a')}{call('b')}{UNFIT}"),
        ToolEpisode(),
        tools=tools,
        template=made.ONE_CALL,
        history="new_sequence",
    )
    on.player.context = replace(on.player.context, parallel_calls=False)
    (outcome,) = on.play()
    assert [arguments for _, _, arguments, _ in tools.calls] == [{"q": "a"}]
    _, turn, answer, last = outcome.messages
    assert [each["function"]["arguments"] for each in turn["tool_calls"]] == [{"q": "a"}]
    assert answer["content"].startswith("found a\n\nError: a message may call one tool, and 2 further calls were not")
    assert "look(q='b')" in answer["content"]
    assert last["content"] == "done"
    assert on.text(outcome, 1).count("<tool_call>\n") == 2, "the call, and the one that the report quotes"


@pytest.mark.parametrize("new", [[], [{"role": "user", "content": "go on"}]])
def test_turn_message_without_answers_is_text(stage: SetUp, new: list[dict[str, str]]) -> None:
    """A user's episode may leave calls, or a truncated turn, unanswered."""
    found = []

    async def solve(session: Any, prompt: Any) -> float:
        await session.generate(prompt.token_ids)
        found.append((session.next_prompt(new), session.messages[1]))
        return 1.0

    on = stage(lambda text: f"Look. {call('a')}{END}", solve, tools=FakeTools(echo), history="new_sequence")
    on.play()
    ids, turn = found[0]
    assert "tool_calls" not in turn
    assert f"Look. {call('a')}{END}" in on.tokenizer.decode(ids)


def test_session_first_turn_continues_the_row_message(stage: SetUp) -> None:
    seen = []

    async def solve(session: Any, prompt: Any) -> float:
        sampled = await session.generate(prompt.token_ids)
        seen.append((session.parse(sampled), session.next_prompt([{"role": "tool", "name": "look", "content": "42"}])))
        seen.append(session.messages)
        return 1.0

    on = stage(lambda text: f"see</think>{call('a')}{END}", solve, tools=FakeTools(echo), history="new_sequence")
    begun = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>Let me "}]
    on.prompt = replace(
        on.prompt, messages=begun, token_ids=np.array(on.player.context.conversation.prompt_ids(begun), np.int32)
    )
    on.play()
    (said, ids), messages = seen
    assert (said.reasoning, len(said.calls)) == ("see", 1)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert on.tokenizer.decode(ids).count("<|im_start|>assistant") == 2


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("history", ["keep", "new_sequence"])
def test_tool_episode_row_offers_and_calls_its_own_tools(stage: SetUp, history: str) -> None:
    on = stage(once(call("it")), ToolEpisode(), tools=FakeTools(echo), history=history)
    for tools, called in ((None, 1), ([made.LOOK], 1), ([ADD], 0), ([ADD, made.LOOK], 1)):
        assert on.tools is not None
        on.tools.calls.clear()
        on.prompt = replace(on.prompt, tools=tools)
        (outcome,) = on.play()
        assert len(on.tools.calls) == called
        if not called:
            assert "there is no such tool; the tools are: add" in on.text(outcome, -1)
        if history == "new_sequence" and tools is not None:
            shown = on.text(outcome, -1).partition("<|im_end|>")[0]
            assert shown == "<|im_start|>system\nTools:" + "".join(tool["function"]["name"] for tool in tools)


def test_tool_episode_row_without_tools_ends_with_its_first_turn(stage: SetUp) -> None:
    on = stage(lambda text: f"{call('it')}{END}", ToolEpisode(), tools=FakeTools(echo))
    on.prompt = replace(on.prompt, tools=[])
    (outcome,) = on.play()
    assert (outcome.turns, outcome.tool_calls, on.tools and on.tools.calls) == (1, 0, [])


def test_session_call_of_a_tool_that_the_row_does_not_offer_fails(stage: SetUp) -> None:
    async def run(session: Session, prompt: EpisodePrompt) -> float:
        await session.generate(prompt.token_ids)
        answer = await session.call("look", {"q": "x"})
        assert [tool["function"]["name"] for tool in session.tools] == ["add"]
        return float(answer.text == "Error: there is no tool look; the tools are: add")

    on = stage(lambda text: f"a{END}", run, tools=FakeTools(echo))
    on.prompt = replace(on.prompt, tools=[ADD])
    (outcome,) = on.play()
    assert (outcome.error, outcome.reward, on.tools and on.tools.calls) == (None, 1.0, [])
