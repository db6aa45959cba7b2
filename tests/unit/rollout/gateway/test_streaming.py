"""Streams of a scripted engine through the whole gateway, with the official clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import openai
import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.gateway.episode import GatewayEpisode
from mcore_rl.rollout.gateway.link import GatewayLink
from mcore_rl.rollout.gateway.reply_stream import ChoiceStream
from mcore_rl.rollout.gateway.server import GatewayServer
from mcore_rl.rollout.gateway.serving import ServedRequests
from mcore_rl.rollout.gateway.settled_text import SettledText
from mcore_rl.rollout.tools.parsers import ToolCallParser, text_reader
from mcore_rl.types import Delta
from tests.unit.data.chat import made
from tests.unit.rollout.episodes.conftest import QUESTION, SetUp, Stage
from tests.unit.rollout.episodes.scripted import END, Say, call
from tests.unit.rollout.gateway.test_server import eventually

TEXT = "Grüße 😀 — to you!"
PERMITS = 12
"""Number of tokens, here bytes, that the engine samples before the client has received text."""


class Served:
    """A served model whose engine samples PERMITS tokens, and the others once `go_on` is called."""

    def __init__(self, stage: Stage, server: GatewayServer) -> None:
        self.stage = stage
        self._permits = threading.Semaphore(PERMITS)
        self._go = threading.Event()
        upstream = stage.engine._run_step

        def step(limit: int) -> list[Any]:
            if not self._go.is_set() and not self._permits.acquire(blocking=False):
                assert self._go.wait(30), "no text has arrived before the end"
            return upstream(limit)

        stage.engine._run_step = step  # type: ignore[method-assign]
        url, token = server.address.url, server.address.token
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key=token, max_retries=0)

    def go_on(self) -> None:
        self._go.set()

    @property
    def is_waiting(self) -> bool:
        return not self._go.is_set()


@pytest.fixture(scope="module")
def server() -> Iterator[GatewayServer]:
    with GatewayServer("tiny", "127.0.0.1", 0, "127.0.0.1", serves=True) as running:
        yield running


@pytest.fixture
def served(stage: SetUp, server: GatewayServer) -> Callable[..., Any]:
    @contextmanager
    def serve(say: Say, parser: str = "hermes") -> Iterator[Served]:
        config = RolloutConfig(episode="a.py:b", max_prompt_tokens=200, max_response_tokens=600)
        episode = GatewayEpisode(config)
        set_up = stage(say, episode, parser=parser)
        serving = ServedRequests(set_up.player, episode, config)
        episode.link = set_up.player.run(GatewayLink.connect(server.address, serving))
        made_of = Served(set_up, server)
        try:
            yield made_of
        finally:
            made_of.go_on()
            made_of.openai.close()
            made_of.anthropic.close()
            set_up.player.run(episode.link.close())

    return serve


def chat(served: Served, **fields: Any) -> Iterator[str]:
    asked: Any = {"model": "any", "messages": QUESTION, "stream": True, **fields}
    for chunk in served.openai.chat.completions.create(**asked):
        yield chunk.choices[0].delta.content or ""


def chat_with_tools(served: Served) -> Iterator[str]:
    return chat(served, tools=[made.LOOK])


def completions(served: Served) -> Iterator[str]:
    for event in served.openai.completions.create(model="any", prompt="q", stream=True, max_tokens=99):
        yield event.choices[0].text


def responses(served: Served) -> Iterator[str]:
    for event in served.openai.responses.create(model="any", input="q", stream=True):
        yield event.delta if event.type == "response.output_text.delta" else ""


def messages(served: Served) -> Iterator[str]:
    with served.anthropic.messages.stream(model="any", max_tokens=99, messages=[QUESTION[0]]) as stream:  # type: ignore[list-item]
        yield from stream.text_stream


@pytest.mark.parametrize("client", [chat, chat_with_tools, completions, responses, messages])
def test_text_arrives_before_the_reply_is_complete(
    served: Callable[..., Any], client: Callable[[Served], Iterator[str]]
) -> None:
    """The engine goes on once the client has text. A character is never cut, though each token is a byte."""
    with served(lambda _: f"{TEXT}{END}") as model:
        texts = []
        for text in client(model):
            texts.append(text)
            if text and model.is_waiting:
                assert TEXT.startswith("".join(texts))
                model.go_on()
    assert "".join(texts) == TEXT
    assert not any("\ufffd" in text for text in texts)


def test_text_before_a_call_streams_and_the_call_is_whole(served: Callable[..., Any]) -> None:
    with served(lambda _: f"<think>Hm. Hm.</think>Let me see.\n{call('a')}{END}") as model:
        asked: Any = {"model": "any", "messages": QUESTION, "tools": [made.LOOK]}
        found, seen = {"content": "", "reasoning_content": ""}, []
        for chunk in model.openai.chat.completions.create(**asked, stream=True):
            delta: Any = chunk.choices[0].delta.model_dump()
            for name in found:
                found[name] += delta.get(name) or ""
            if found["reasoning_content"]:
                seen.append(found["reasoning_content"])
                model.go_on()
            assert not any(each in found["content"] for each in ("<", "tool", "look"))
            calls = chunk.choices[0].delta.tool_calls or []
            arguments = [each.function.arguments for each in calls if each.function.arguments]
            if arguments:
                assert arguments == ['{"q": "a"}']
        assert found == {"content": "Let me see.", "reasoning_content": "Hm. Hm."}
        assert chunk.choices[0].finish_reason == "tool_calls"
        assert len(seen) > 1, "the reasoning arrives in parts"
        message = model.openai.chat.completions.create(**asked).choices[0].message
        assert (message.content, len(message.tool_calls)) == ("Let me see.", 1)


@pytest.mark.parametrize("tools", [[], [made.LOOK]])
def test_no_part_of_a_stop_string_is_sent(served: Callable[..., Any], tools: list[Any]) -> None:
    with served(lambda _: f"Seen: 1. Obs: 5{END}") as model:
        model.go_on()
        options: Any = {"stop": ["Obs:"], "tools": tools}
        texts = list(chat(model, **options))
        reply = model.openai.chat.completions.create(model="any", messages=QUESTION, **options)
    # White space around the content of a turn with tools is removed.
    expected = "Seen: 1." if tools else "Seen: 1. "
    assert "".join(texts) == reply.choices[0].message.content == expected
    assert not any("O" in text for text in texts)


def test_several_choices_stream_with_log_probabilities_and_usage(served: Callable[..., Any]) -> None:
    with served(lambda _: f"{TEXT}{END}") as model:
        asked: Any = {"model": "any", "messages": QUESTION, "n": 2, "logprobs": True}
        texts, logps, early = ["", ""], [[], []], set()
        for chunk in model.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                logps[choice.index] += [] if choice.logprobs is None else choice.logprobs.content
                if choice.delta.content and model.is_waiting:
                    early.add(choice.index)
            if len(early) == 2:
                model.go_on()
        whole = model.openai.chat.completions.create(**asked)
    assert texts == [TEXT, TEXT] == [choice.message.content for choice in whole.choices]
    assert logps == [choice.logprobs.content for choice in whole.choices]
    assert chunk.usage == whole.usage


def test_a_client_that_leaves_amid_a_stream_aborts_it(served: Callable[..., Any]) -> None:
    with served(lambda _: f"{TEXT}{END}") as model:
        stream = model.openai.chat.completions.create(model="any", messages=QUESTION, stream=True)
        assert any(chunk.choices[0].delta.content for chunk in stream)
        stream.close()
        # The engine's thread is inside of a step.
        model._permits.release()
        model.go_on()
        assert eventually(lambda: bool(model.stage.engine.cancelled) or not model.stage.engine.num_running)


@pytest.mark.parametrize("client", [chat, completions, responses, messages])
def test_a_stream_ends_when_its_tokens_are_sampled_again(
    served: Callable[..., Any], client: Callable[[Served], Iterator[str]]
) -> None:
    """After an abort and with other weights. The error arrives before the reply is complete."""
    with served(lambda _: f"{TEXT}{END}") as model:
        engine, loop, texts = model.stage.engine, model.stage.player.client.loop, list[str]()

        def sample_again() -> None:
            assert model._go.wait(30)  # it may be set after this call has begun
            model._go.clear()
            [running] = [entry.request for entry in engine._running.values()]
            engine.abort([running.request_id])
            engine._say = lambda _: f"Bad day{END}"  # the client has at least one character of the other text
            engine.submit([running])
            loop._reported.resume([running])

        def read() -> None:
            for text in client(model):
                texts.append(text)
                if text and len("".join(texts)) == len(text):
                    model._permits.release(4)  # for "Bad "
                    loop._enqueue(sample_again)
                    model.go_on()  # until sample_again

        with pytest.raises((openai.APIError, anthropic.APIError), match="sampled the reply again"):
            read()
        assert model.is_waiting
        assert TEXT.startswith("".join(texts))
        model.go_on()
        assert eventually(lambda: not engine.num_running)


def stream_of(text: str) -> tuple[ChoiceStream, list[int]]:
    """Return the stream of a choice that may call tools, and the tokens of a text."""
    tokenizer = made.tokenizer(None)
    reader = ToolCallParser("hermes", None, [made.LOOK]).reader()
    assert reader is not None
    stream = ChoiceStream(0, SettledText(tokenizer.decode), reader, None, None)
    return stream, tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(("place", "is_shown"), [(0, True), (1, True), (2, False), (3, False)])
def test_other_tokens_contradict_a_stream_if_their_text_is_shown(place: int, is_shown: bool) -> None:
    """The rest of a text is left to the complete reply if a reader has tokens that are no part of it."""
    stream, ids = stream_of("hi<tool_call>x")
    other = [*ids[:place], ids[-1], ids[-1]]
    assert stream.add(0, Delta("r", ids[:2], [0.0] * 2, 0))
    assert [delta.text for delta in stream.take()] == ["hi"]
    assert stream.add(2, Delta("r", ids[2:], [0.0] * len(ids[2:]), 0))
    assert stream.take() == []
    assert stream.add(0, Delta("r", ids[:3], [0.0] * 3, 0)), "the same tokens"
    same_part = len(other) - 1  # the first token may be sampled in another step
    assert stream.add(0, Delta("r", other[:same_part], [0.0] * same_part, 0)) is not is_shown
    if not is_shown:
        assert stream.add(same_part, Delta("r", [*other[same_part:], *ids], [0.0] * (len(ids) + 1), 0))
        assert stream.take() == []
        assert not stream.add(0, Delta("r", [ids[-1]], [0.0], 0)), "shown tokens are still compared"


def test_an_end_token_is_no_text_unless_another_follows() -> None:
    """It may arrive before the complete reply, whose text does not have it."""
    tokenizer = made.tokenizer(None)
    hi, end = tokenizer.encode("hi", add_special_tokens=False), tokenizer.eos_token_id
    reader = text_reader()
    stream = ChoiceStream(0, SettledText(tokenizer.decode), reader, None, None, {end})
    stream.add(0, Delta("r", [*hi, end], [0.0] * 3, 0))
    assert [delta.text for delta in stream.take()] == ["hi"]
    stream.add(1, Delta("r", [hi[1], end, hi[0]], [0.0] * 3, 0))  # the first two are known
    assert [(delta.start, delta.text) for delta in stream.take()] == [(2, f"{END}h")]


def test_a_users_parser_gets_the_whole_message(served: Callable[..., Any]) -> None:
    with served(lambda _: f"say{END}", parser=f"{__name__}:shouts") as model:
        model.go_on()
        texts = list(chat(model, tools=[made.LOOK]))
    assert [text for text in texts if text] == ["SAY"]


def shouts(text: str, schemas: Any) -> Any:
    """Parse a message as a user's function."""
    from mcore_rl.rollout.tools.parsers import ParsedMessage

    return ParsedMessage(text.upper(), "", ())
