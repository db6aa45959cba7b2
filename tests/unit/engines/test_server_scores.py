"""A teacher's server: requests and answers of every interface, order, retries and failures."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from mcore_rl.config.models import TeacherConfig
from mcore_rl.engines.server.client import ServerScorer, connect, token_limit, try_server
from mcore_rl.errors import ConfigError, TeacherError
from mcore_rl.types import TokenSequence

VOCABULARY = 50
Answer = tuple[int, Any]


def log_p(token: int, place: int) -> float:
    """Log-probability that the fake model gives a token: distinct for all tokens and places."""
    return -0.5 - 0.01 * token - 0.001 * place


def best(k: int) -> list[int]:
    return list(range(k))


def vllm(body: dict[str, Any]) -> Any:
    ids, k = body["prompt"], body["prompt_logprobs"]

    def entry(token: int, place: int) -> dict[str, Any]:
        return {"logprob": log_p(token, place), "rank": token + 1, "decoded_token": f"t{token}"}

    # The token itself comes first, as in vLLM.
    tables = [{str(t): entry(t, place) for t in [ids[place], *best(k)]} for place in range(1, len(ids))]
    return {"choices": [{"text": "x", "prompt_logprobs": [None, *tables]}]}


def completions(body: dict[str, Any]) -> Any:
    assert (body["echo"], body["max_tokens"]) == (True, 1)
    ids = [*body["prompt"], 7]
    values = [None, *(log_p(token, place) for place, token in enumerate(ids) if place)]
    found = {"tokens": [f"t{token}" for token in ids], "token_logprobs": values, "top_logprobs": [None] * len(ids)}
    return {"choices": [{"text": "x", "logprobs": found}]}


def sglang(body: dict[str, Any]) -> Any:
    ids, start, k = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
    places = range(start + 1, len(ids))
    tops = [[[log_p(token, place), token, None] for token in best(k)] for place in places]
    values = [[log_p(ids[place], place), ids[place], f"t{ids[place]}"] for place in places]
    return {
        "meta_info": {"input_token_logprobs": [[None, ids[start], None], *values], "input_top_logprobs": [None, *tops]}
    }


SAYS = {"vllm": vllm, "completions": completions, "sglang": sglang}
PATHS = {"vllm": "/v1/completions", "completions": "/v1/completions", "sglang": "/generate"}


class Server:
    """A fake server that answers with `says(body)` and records requests."""

    def __init__(self, says: Callable[[dict[str, Any]], Answer], models: tuple[str, ...]) -> None:
        self.requests: list[tuple[str, str | None]] = []
        self.cut_bytes = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = bool(models) and self.path == "/v1/models"
                listed = [{"id": name, "max_model_len": 64 + place} for place, name in enumerate(models)]
                self.answer(200 if found else 404, {"data": listed})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.path, self.headers["Authorization"]))
                self.answer(*says(body))

            def answer(self, status: int, body: Any) -> None:
                text = json.dumps(body).encode()
                self.send_response(status)
                if status < 400 and "to" in body:
                    self.send_header("Location", body["to"])
                # The connection ends before the last bytes of an error.
                cut = server.cut_bytes if status >= 400 else 0
                self.send_header("Content-Length", str(len(text) + cut))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(says: Callable[[dict[str, Any]], Answer], models: tuple[str, ...] = ("teacher",)) -> Server:
        servers.append(Server(says, models))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def scorer_of(url: str, key: str | None = None, **keys: Any) -> ServerScorer:
    config = TeacherConfig(url=url, **keys)
    return connect(config, config.entries[0], key)


def sequence(*ids: int, start: int = 1) -> TokenSequence:
    return TokenSequence(np.array(ids, np.int32), start)


@pytest.mark.parametrize("api", SAYS)
@pytest.mark.parametrize("k", [0, 3])
def test_score_returns_logp_of_tokens_from_start(api: str, k: int, serve: Callable[..., Server]) -> None:
    if api == "completions" and k:
        pytest.skip("it has no ids")
    server = serve(lambda body: (200, SAYS[api](body)))
    sequences = [sequence(*range(9, 9 + n), start=n - 3) for n in (4, 12, 7, 30)]
    found = scorer_of(server.url, "secret", api=api, max_concurrent_requests=3).score(sequences, k)
    for given, scores in zip(sequences, found, strict=True):
        places = range(given.start, len(given.token_ids))
        assert scores.logp == pytest.approx([log_p(given.token_ids[place], place) for place in places])
        assert (scores.top_ids is None) == (scores.top_logp is None) == (k == 0)
        if k:
            assert scores.top_ids is not None
            assert scores.top_logp is not None
            assert scores.top_ids.tolist() == [best(k)] * 3
            listed = [[log_p(token, place) for token in best(k)] for place in places]
            assert scores.top_logp[:, :k] == pytest.approx(np.array(listed))
            # Three tokens of 0.6 each are more than 1: the rest has the smallest probability, not a NaN.
            assert np.exp(scores.top_logp[:, k]) == pytest.approx(np.full(3, np.finfo(np.float32).eps))
    assert set(server.requests) == {(PATHS[api], "Bearer secret")}


def test_score_retries_a_busy_server(serve: Callable[..., Server]) -> None:
    answers = iter([(503, {"error": "busy"}), (429, {})])
    server = serve(lambda body: next(answers, (200, vllm(body))))
    (scores,) = scorer_of(server.url, max_retries=2).score([sequence(1, 2)], 0)
    assert scores.logp == pytest.approx([log_p(2, 1)])
    assert len(server.requests) == 3


def test_score_retries_an_error_whose_text_is_cut_off(serve: Callable[..., Server]) -> None:
    answers = iter([(503, {"error": "busy"})])
    server = serve(lambda body: next(answers, (200, vllm(body))))
    server.cut_bytes = 5
    assert len(scorer_of(server.url, max_retries=1).score([sequence(1, 2)], 0)) == 1
    server = serve(lambda body: (400, {}))
    server.cut_bytes = 5
    with pytest.raises(TeacherError, match=r"HTTP 400 \(IncompleteRead"):
        scorer_of(server.url).score([sequence(1, 2)], 0)


def test_score_after_any_exception_sends_no_more_requests(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def ask(self: ServerScorer, sequence: TokenSequence, top_k: int) -> Any:
        sent.append(top_k)
        if len(sent) == 1:
            raise ZeroDivisionError
        assert self._stopped.wait(2)

    monkeypatch.setattr(ServerScorer, "ask", ask)
    server = serve(lambda body: (200, vllm(body)))
    with pytest.raises(ZeroDivisionError):
        scorer_of(server.url, max_concurrent_requests=2).score([sequence(1, 2)] * 12, 0)
    assert len(sent) <= 3


def test_score_of_a_dead_server_names_it_within_seconds(serve: Callable[..., Server]) -> None:
    server = serve(lambda body: (200, vllm(body)))
    scorer = scorer_of(server.url, max_retries=1, max_concurrent_requests=2)
    server.close()
    begun = time.monotonic()
    with pytest.raises(TeacherError, match=rf"^teacher\.url={server.url} gave no log-probabilities after 2 attempts"):
        scorer.score([sequence(1, 2)] * 40, 0)
    assert time.monotonic() - begun < 10  # not once per sequence
    server.http.socket.close()


def test_score_waits_longer_for_an_answer_than_for_a_connection(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is down must not take teacher.timeout_seconds per attempt."""
    server = serve(lambda body: (200, vllm(body)))
    scorer, limits = scorer_of(server.url, timeout_seconds=77.0, max_retries=1), list[float]()
    connect = socket.create_connection

    def record(address: Any, timeout: float, *given: Any) -> Any:
        limits.append(timeout)
        if len(limits) == 1:
            raise TimeoutError("timed out")
        opened.append(connect(address, timeout, *given))
        return opened[0]

    opened: list[socket.socket] = []
    monkeypatch.setattr(socket, "create_connection", record)
    set_timeout, answers = socket.socket.settimeout, list[float | None]()
    monkeypatch.setattr(
        socket.socket, "settimeout", lambda it, value: (answers.append(value), set_timeout(it, value))[1]
    )
    assert len(scorer.score([sequence(1, 2)], 0)) == 1
    assert limits == [5.0, 5.0]
    assert 77.0 in answers


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {"error": "too long"}), r"HTTP 400 \{\"error\": \"too long\"\}"),
        # To a page that answers, but not to this request.
        ((302, {"to": "/v1/models"}), r"HTTP 302 redirects to /v1/models, which is not followed"),
        ((200, {"choices": [{"text": "x"}]}), r"no log-probabilities in the form of teacher\.api=vllm \(KeyError"),
        ((200, vllm({"prompt": [1, 2], "prompt_logprobs": 1})), r"does not fit: it has 2 tokens, not the 3"),
        ((200, vllm({"prompt": [1, 2, 4], "prompt_logprobs": 1})), r"does not fit: it has no log-probability of tok"),
    ],
)
def test_score_rejects_an_answer_without_a_retry(answer: Answer, message: str, serve: Callable[..., Server]) -> None:
    server = serve(lambda body: answer)
    scorer = scorer_of(server.url)
    with pytest.raises(TeacherError, match=message):
        scorer.score([sequence(1, 2, 3)], 0)
    assert len(server.requests) == 1
    with pytest.raises(ConfigError, match=message):
        try_server(scorer, sequence(1, 2, 3), 0)


def test_connect_needs_one_model_or_its_name(serve: Callable[..., Server]) -> None:
    server = serve(lambda body: (200, vllm(body)), models=("a", "b"))
    with pytest.raises(ConfigError, match=r"serves a, b; name the teacher in teacher\.served_model"):
        scorer_of(server.url)
    assert scorer_of(server.url, served_model="b").model == "b"
    config = replace(TeacherConfig(url="http://127.0.0.1:9/v1"), timeout_seconds=1)
    with pytest.raises(ConfigError, match=r"^teacher\.url=http://127\.0\.0\.1:9/v1 does not answer: .*refused"):
        connect(config, config.entries[0], None)


def test_token_limit_is_the_one_of_the_model(serve: Callable[..., Server]) -> None:
    server = serve(lambda body: (200, {}), models=("a", "b"))
    assert token_limit(scorer_of(server.url, served_model="b")) == 65
    for url in (server.url, server.url.removesuffix("/v1"), f"{server.url}/"):
        assert token_limit(scorer_of(url, api="sglang")) == 64
    without = serve(lambda body: (200, {}), models=())
    assert token_limit(scorer_of(without.url, api="sglang")) is None
    with pytest.raises(ConfigError, match=r"does not answer: .*HTTP 404"):
        token_limit(scorer_of(without.url, served_model="b"))
