"""A judge on an external server: HTTP requests, order of answers, and failures."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.reward import JudgeConfig
from mcore_rl.data.transcripts import Transcript
from mcore_rl.errors import ConfigError, RewardError
from mcore_rl.rewards.judge.judge import Judge, JudgeVerdict, describe
from mcore_rl.rewards.judge.prompts import JudgePrompts, Template
from mcore_rl.rewards.judge.scores import score_reader
from mcore_rl.rewards.judge.server import ServerAnswerer, served_model, try_server
from mcore_rl.rewards.task_parts import TranscriptReader
from mcore_rl.types import Prompt

TEMPLATE = "{prompt}={response}"
Answer = tuple[int, dict[str, Any]]


def said(text: str, finish_reason: str = "stop") -> Answer:
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 1, "completion_tokens": len(text), "total_tokens": 1 + len(text)}
    return 200, {"id": "1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}


MOVED = 307
"""Code of a redirect that keeps method and body."""


class Server:
    """A fake server that answers with `says(body)` and records bodies and keys."""

    def __init__(self, says: Callable[[dict[str, Any]], Answer], models: tuple[str, ...] = ("judge-7b",)) -> None:
        self.says, self.models = says, models
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.keys.add(self.headers["Authorization"])
                listed = [{"id": name, "object": "model", "created": 0, "owned_by": "us"} for name in server.models]
                self.answer(200, {"object": "list", "data": listed})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.bodies.append(body)
                server.keys.add(self.headers["Authorization"])
                self.answer(*server.says(body))

            def answer(self, status: int, body: dict[str, Any]) -> None:
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                if status == MOVED:
                    self.send_header("Location", body["to"])
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None: ...

        return Handler


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(says: Callable[[dict[str, Any]], Answer], **options: Any) -> Server:
        servers.append(Server(says, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def question_of(body: dict[str, Any]) -> str:
    (message,) = body["messages"]
    assert message["role"] == "user"
    text: str = message["content"]
    return text


def counts_letters(body: dict[str, Any]) -> Answer:
    return said(f"Score: {len(question_of(body).partition('=')[2])}.")


def config_of(server: Server, **keys: Any) -> JudgeConfig:
    return JudgeConfig(url=server.url, template=TEMPLATE, unparsable=-1, max_retries=0, **keys)


def judged(
    config: JudgeConfig,
    texts: list[str],
    *,
    prompts: JudgePrompts | None = None,
    max_failed: float = 1.0,
    seed: int = 1,
) -> list[JudgeVerdict]:
    template = Template(TEMPLATE) if prompts is None else prompts.template
    answerer = ServerAnswerer(config, template, prompts, model="judge-7b", key=None, max_failed=max_failed)
    prompt = Prompt(0, np.array([49], np.int32), "1+1", "src", "2", messages=[{"role": "user", "content": "1+1"}])
    reader = TranscriptReader({}, None)  # type: ignore[arg-type]
    judge = Judge(answerer, score_reader(config), reader, config, seed)
    rows = np.arange(len(texts))
    with answerer.awake():
        return judge.verdicts([Transcript(prompt, text) for text in texts], 0 * rows, rows)


def test_every_response_has_its_own_score_whatever_comes_first(serve: Callable[..., Server]) -> None:
    first_waits = threading.Event()

    def says(body: dict[str, Any]) -> Answer:
        if question_of(body) == "1+1=a":
            first_waits.wait(10)
        else:
            first_waits.set()
        return counts_letters(body)

    server = serve(says)
    verdicts = judged(config_of(server, temperature=0.5, top_p=0.9, max_response_tokens=20), ["a", "", "ccc"])
    assert [verdict.score for verdict in verdicts] == [1, 0, 3]
    assert verdicts[2].record()["judge"] == [
        {"text": "Score: 3.", "tokens": 9, "finish_reason": "stop", "score": 3.0, "error": None}
    ]
    (asked,) = (body for body in server.bodies if question_of(body) == "1+1=ccc")
    assert {key: asked[key] for key in asked if key not in ("messages", "seed")} == {
        "model": "judge-7b",
        "max_tokens": 20,
        "temperature": 0.5,
        "top_p": 0.9,
    }


def test_every_answer_is_asked_for_with_a_seed_of_its_own_that_repeats(serve: Callable[..., Server]) -> None:
    server = serve(counts_letters)
    config = config_of(server, samples=2, temperature=1.0)
    (verdict, _) = judged(config, ["a", "bb"])
    assert len(verdict.answers) == 2
    seeds = {(question_of(body), body["seed"]) for body in server.bodies}
    assert len({seed for _, seed in seeds}) == 4
    server.bodies.clear()
    judged(config, ["a", "bb"])
    assert {(question_of(body), body["seed"]) for body in server.bodies} == seeds


def test_so_many_questions_are_under_way_and_no_more(serve: Callable[..., Server]) -> None:
    gate = threading.Barrier(3)  # opens for three concurrent requests
    running, counts = list[Answer](), list[int]()

    def says(body: dict[str, Any]) -> Answer:
        running.append(counts_letters(body))
        counts.append(len(running))
        gate.wait(10)
        time.sleep(0.05)  # further requests would arrive meanwhile
        return running.pop()

    judged(config_of(serve(says), max_concurrent_requests=3), ["a"] * 9)
    assert max(counts) == 3


def test_a_failure_is_tried_again_and_then_costs_its_response(serve: Callable[..., Server]) -> None:
    failures = {"1+1=once": 1, "1+1=always": 9}

    def says(body: dict[str, Any]) -> Answer:
        question = question_of(body)
        failures[question] = failures.get(question, 0) - 1
        return counts_letters(body) if failures[question] < 0 else (503, {"error": {"message": "too busy"}})

    verdicts = judged(replace(config_of(serve(says)), max_retries=1), ["once", "always", "ok"])
    assert [verdict.score for verdict in verdicts] == [4, -1, 2]
    (answer,) = verdicts[1].answers
    assert answer.error is not None
    assert "too busy" in answer.error
    figures = {name: metric.value for name, metric in describe(verdicts).items()}
    assert figures["judge/failed_fraction"] == figures["judge/unparsable_fraction"] == pytest.approx(1 / 3)
    assert figures["judge/too_long_fraction"] == 0
    assert figures["judge/response_tokens"] == 9


def test_too_many_failures_end_the_run(serve: Callable[..., Server]) -> None:
    def says(body: dict[str, Any]) -> Answer:
        return (400, {"error": {"message": "too long"}}) if "bad" in question_of(body) else counts_letters(body)

    server = serve(says)
    assert len(judged(config_of(server), ["bad", "ok"], max_failed=1.0)) == 2
    for max_failed in (0.5, 0.0):
        with pytest.raises(
            RewardError, match=r"^judge\.url=\S+ failed on 1 of 2 questions, and reward\.max_error_fraction"
        ):
            judged(config_of(server), ["bad", "ok"], max_failed=max_failed)


def test_a_server_that_is_gone_ends_the_run_by_name(serve: Callable[..., Server]) -> None:
    config = config_of(serve(counts_letters))
    with pytest.raises(RewardError, match=r"failed on 1 of 1 questions, .*APIConnectionError"):
        judged(replace(config, url="http://127.0.0.1:9/v1"), ["a"])


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (said("Score: 1", "length"), "the answer was cut at its score"),
        ((200, {**said("")[1], "choices": []}), "the server's answer has no choices"),
    ],
)
def test_an_answer_that_is_cut_or_empty_has_no_score(serve: Callable[..., Server], answer: Answer, error: str) -> None:
    server = serve(lambda body: answer if "bad" in question_of(body) else counts_letters(body))
    bad, good = judged(config_of(server), ["bad", "ok"])
    assert (bad.score, good.score) == (-1, 2)
    assert error in str(bad.answers[0].error)


def test_judge_tokenizer_skips_long_questions_and_control_tokens(serve: Callable[..., Server], tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    server = serve(counts_letters)
    prompts = JudgePrompts(tokenizer, TEMPLATE)
    verdicts = judged(config_of(server, max_prompt_tokens=8), ["<|end|>abcd", "abcde"], prompts=prompts)
    assert [verdict.score for verdict in verdicts] == [4, -1]
    assert [question_of(body) for body in server.bodies] == ["1+1=abcd"]
    assert verdicts[1].answers[0].error == "the question has 9 tokens, judge.max_prompt_tokens is 8"


def test_the_only_model_is_asked_and_one_of_several_must_be_named(serve: Callable[..., Server]) -> None:
    assert served_model(config_of(serve(counts_letters)), None) == "judge-7b"
    several = config_of(serve(counts_letters, models=("a", "b")))
    with pytest.raises(ConfigError, match=r"^judge\.url=\S+ serves a, b; name the judge in judge\.served_model"):
        served_model(several, None)
    assert served_model(replace(several, served_model="b"), None) == "b"


def test_a_server_is_tried_before_anything_starts_with_its_key(serve: Callable[..., Server]) -> None:
    server = serve(counts_letters)
    try_server(config_of(server), "secret")
    assert server.keys == {"Bearer secret"}
    assert [body["model"] for body in server.bodies] == ["judge-7b"]
    refusing = serve(lambda _: (401, {"error": {"message": "who are you?"}}))
    with pytest.raises(ConfigError, match=r"^judge\.url=\S+ does not answer: .*who are you\?.*judge\.api_key_variable"):
        try_server(config_of(refusing), None)
    with pytest.raises(
        ConfigError, match=r"^judge\.url=http://127\.0\.0\.1:9/v1 does not answer: .*set it to the addr"
    ):
        try_server(replace(config_of(server), url="http://127.0.0.1:9/v1"), None)


def test_judge_server_that_redirects_sends_nothing_to_the_other_host(serve: Callable[..., Server]) -> None:
    other = serve(counts_letters)
    moved = serve(lambda _: (MOVED, {"to": f"{other.url}/chat/completions"}))
    message = f"HTTP 307 redirects to {other.url}/chat/completions, which is not followed"
    with pytest.raises(ConfigError, match=message):
        try_server(config_of(moved), "secret")
    with pytest.raises(RewardError, match=message):
        judged(config_of(moved), ["a"])
    assert other.bodies == []
