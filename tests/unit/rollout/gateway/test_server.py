"""The HTTP server: keys, bodies, sessions, streams that wait, and clients that leave."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from mcore_rl.rollout.gateway import answering, server
from mcore_rl.rollout.gateway.exchange import HarnessEnd, RefusedError, Reward
from mcore_rl.rollout.gateway.harness import forwarder
from tests.unit.rollout.gateway.scripted import ADMIN, KEY, LIMIT, OWNER_KEY, ScriptedSessions, serving

CHAT = "/sessions/s1/v1/chat/completions"
INTERFACES = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    "/sessions/s1/v1/completions": {"prompt": "hello"},
    "/sessions/s1/v1/responses": {"input": "hello"},
    "/sessions/s1/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9},
}
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def http(address: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=address, timeout=20) as made:
        yield made


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("listen", [lambda: server._listen("127.0.0.1", 0), lambda: forwarder.listen(0)])
def test_accepted_connections_send_small_packets_at_once(listen: Callable[[], socket.socket]) -> None:
    """Otherwise the body of each reply is late by the 40 ms of a delayed acknowledgement."""
    with (
        listen() as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_programs_connect_as_soon_as_the_address_is_known(tmp_path: Path) -> None:
    """The HTTP server begins to listen after that; without a queue, their first connections would be refused."""
    with server._listen("127.0.0.1", 0) as tcp, server._unix_socket(tmp_path / "s") as local:
        socket.create_connection(tcp.getsockname()).close()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(local.getsockname())


@pytest.mark.parametrize("path", [*INTERFACES, "/sessions/s1/reward"])
def test_unknown_sessions_and_wrong_keys_have_the_same_error(http: httpx2.Client, path: str) -> None:
    unknown = path.replace("s1", "unknown")
    given: list[tuple[str, dict[str, str | bytes]]] = [
        (path, {}),
        (path, {"authorization": "Bearer key-of-s2"}),
        (path, {"authorization": f"Basic {KEY}"}),
        (path, {"x-api-key": "k\xe9".encode("latin-1")}),
        (path, {"authorization": "Bearer"}),
        (path, {"x-api-key": ""}),
        (unknown, BEARER),
        (unknown, {"authorization": "Bearer None"}),
    ]
    replies = [http.post(each, headers=headers, json=INTERFACES.get(path, {})) for each, headers in given]
    assert {reply.status_code for reply in replies} == {401}
    assert len({reply.text for reply in replies}) == 1


@pytest.mark.parametrize("headers", [BEARER, {"x-api-key": KEY}, {"authorization": f"bearer {ADMIN}"}])
def test_keys_are_accepted_in_both_headers(http: httpx2.Client, headers: dict[str, str]) -> None:
    assert http.post(CHAT, headers=headers, json=INTERFACES[CHAT]).status_code == 200


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("path", INTERFACES)
def test_bodies_above_the_limit_are_not_read(http: httpx2.Client, path: str, declared: bool) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(2560):
            sent += 4096
            yield b" " * 4096

    reply = http.post(path, headers=BEARER, content=b" " * 10 * 2**20 if declared else chunks())
    assert (reply.status_code, f"more than {LIMIT} bytes" in reply.text) == (413, True)
    # The connection is closed or drained; the next request works.
    assert http.post(CHAT, headers=BEARER, json=INTERFACES[CHAT]).status_code == 200


def test_body_below_the_limit_arrives_whole(http: httpx2.Client, sessions: ScriptedSessions) -> None:
    text = "ä" * (LIMIT // 2 - 100)
    body = json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False).encode()
    assert LIMIT - 200 < len(body) <= LIMIT
    assert http.post(CHAT, headers=BEARER, content=body).status_code == 200
    assert sessions.requests[0].messages[0]["content"] == text


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\xc3"}]}', "not UTF-8"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": 1e999}', "beyond the range"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "half of a character"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested more than 100 levels"),
        (b"[" * 200_000, "nested more than 100 levels"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_malformed_bodies_are_refused(http: httpx2.Client, body: bytes, problem: str) -> None:
    for path in (*INTERFACES, "/sessions/s1/reward"):
        headers = {"authorization": f"Bearer {OWNER_KEY}"} if path.endswith("reward") else BEARER
        reply = http.post(path, headers=headers, content=body)
        assert (reply.status_code, problem in reply.text) == (400, True), reply.text


def test_paths_and_methods_that_do_not_exist_have_json_errors(http: httpx2.Client) -> None:
    for path in ("/", "/docs", "/openapi.json", "/redoc", "/sessions/s1/v1/embeddings", "/v1/chat/completions"):
        reply = http.get(path)
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error"), path
    assert http.get(CHAT).status_code == 405
    assert http.post("/sessions/s1/v1/messages/count_tokens").json()["type"] == "error"
    assert http.get("/health").json() == {"status": "ok"}


def test_failure_of_the_server_has_a_json_error(http: httpx2.Client, sessions: ScriptedSessions) -> None:
    sessions.failure = ZeroDivisionError("secret")
    reply = http.post(CHAT, headers=BEARER, json=INTERFACES[CHAT])
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in reply.text


@pytest.mark.parametrize("path", INTERFACES)
def test_stream_pings_while_the_model_samples(
    http: httpx2.Client, sessions: ScriptedSessions, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "PING_SECONDS", 0.05)
    sessions.seconds = 0.5
    with http.stream("POST", path, headers=BEARER, json={**INTERFACES[path], "stream": True}) as reply:
        text = "".join(reply.iter_text())
    begun, _, rest = text.partition("data: {" if "messages" not in path else "event: message_start")
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert 3 <= begun.count("ping") <= 20
    assert "ping" not in rest
    assert rest.rstrip().endswith(("[DONE]", "}"))


@pytest.mark.parametrize("path", INTERFACES)
def test_error_after_the_first_ping_is_an_event(
    http: httpx2.Client, sessions: ScriptedSessions, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anthropic

    monkeypatch.setattr(answering, "PING_SECONDS", 0.05)
    sessions.seconds, sessions.refusal = 0.2, RefusedError(503, "the run has ended")
    root = str(http.base_url).rstrip("/") + "/sessions/s1"
    body = INTERFACES[path]
    with (
        openai.OpenAI(base_url=f"{root}/v1", api_key=KEY, max_retries=0) as client,
        anthropic.Anthropic(base_url=root, api_key=KEY, max_retries=0) as other,
    ):
        create = {
            "completions": client.completions.create,
            "chat/completions": client.chat.completions.create,
            "responses": client.responses.create,
            "messages": other.messages.create,
        }[path.partition("/v1/")[2]]
        events = create(model="any", stream=True, **body)
        with pytest.raises((openai.APIError, anthropic.APIError), match="the run has ended"):
            list(events)


@pytest.mark.parametrize(("stream", "ping_seconds"), [(False, 60.0), (True, 60.0), (True, 0.02)])
def test_client_that_leaves_cancels_its_request(
    address: str,
    sessions: ScriptedSessions,
    stream: bool,
    ping_seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answering, "PING_SECONDS", ping_seconds)
    sessions.seconds = 60.0
    url, body = f"{address}{CHAT}", {**INTERFACES[CHAT], "stream": stream}
    with httpx2.Client(timeout=0.3) as http:
        if ping_seconds < 1:
            with http.stream("POST", url, headers=BEARER, json=body) as reply:
                next(reply.iter_raw())
        else:
            with pytest.raises(httpx2.TimeoutException):
                http.post(url, headers=BEARER, json=body)
    assert eventually(lambda: sessions.num_cancelled == 1)


def test_client_that_leaves_in_its_body_is_forgotten(http: httpx2.Client, sessions: ScriptedSessions) -> None:
    with socket.create_connection((http.base_url.host, http.base_url.port)) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 100\r\n\r\n{{"
        connection.sendall(head.encode())
    assert http.post(CHAT, headers=BEARER, json=INTERFACES[CHAT]).status_code == 200
    assert len(sessions.requests) == 1


def test_sessions_are_taken_with_the_token_only(http: httpx2.Client, sessions: ScriptedSessions) -> None:
    token = {"authorization": f"Bearer {ADMIN}"}
    assert http.post("/sessions", headers=BEARER).status_code == 401
    assert http.post("/sessions").status_code == 401
    assert http.post("/sessions", headers=token).json() == {
        "id": "s1",
        "key": KEY,
        "owner_key": OWNER_KEY,
        "row": {"question": "2 + 3?"},
    }
    assert http.post("/sessions", headers=token, json={"seconds": 0.05}).status_code == 204
    assert http.post("/sessions", headers=token, json={"seconds": 61}).status_code == 400
    with pytest.raises(httpx2.TimeoutException):
        http.post("/sessions", headers=token, json={"seconds": 50}, timeout=0.2)
    assert eventually(lambda: sessions.num_cancelled == 1)


def test_server_without_token_gives_no_sessions() -> None:
    with serving(ScriptedSessions(), admin_token=None) as address, httpx2.Client(base_url=address) as http:
        for token in ("Bearer None", "Bearer", f"Bearer {ADMIN}"):
            headers = {"authorization": token}
            assert http.post("/sessions", headers=headers).status_code == 403
            assert http.post("/sessions/unknown/reward", headers=headers).status_code == 401


def test_rewards_and_ends_reach_their_session(http: httpx2.Client, sessions: ScriptedSessions) -> None:
    session = "/sessions/s2"
    key = {"x-api-key": "owner-key-of-s2"}
    # A program has this key, and may run code of the model.
    of_program = {"x-api-key": "key-of-s2"}
    assert http.post(f"{session}/reward", headers=of_program, json={"reward": 1}).status_code == 401
    assert http.delete(session, headers=of_program).status_code == 401
    assert http.post(f"{session}/reward", headers=key, json={"reward": 1}).status_code == 200
    assert http.post(f"{session}/reward", headers=key, json={"reward": -0.5, "call": "reply-1"}).status_code == 200
    for wrong in ({}, {"reward": "1"}, {"reward": True}, {"reward": 1e31}, {"reward": 1, "call": 3}):
        assert http.post(f"{session}/reward", headers=key, json=wrong).status_code == 400
    assert sessions.rewards == [("s2", Reward(1.0)), ("s2", Reward(-0.5, "reply-1"))]
    assert http.get(session, headers=key, params={"seconds": 1}).json() == {"ended": False}
    assert http.delete(session, headers=BEARER).status_code == 401
    assert http.delete(session, headers=key).status_code == 200
    assert (
        http.request("DELETE", session, headers=key, json={"extra": {"code": 1}, "error": "crash"}).status_code == 200
    )
    assert http.request("DELETE", session, headers=key, json={"extra": []}).status_code == 200
    assert http.request("DELETE", session, headers=key, json={"extra": [1]}).status_code == 400
    assert sessions.ends[:2] == [("s2", HarnessEnd()), ("s2", HarnessEnd({"code": 1}, "crash"))]
    assert http.get(session, headers=key).json() == {"ended": True}
    assert http.get(session, headers=BEARER).status_code == 401
    for wrong in ("nan", "inf", "-1", "61", "soon"):
        reply = http.get(session, headers=key, params={"seconds": wrong})
        assert (reply.status_code, "seconds: " in reply.json()["error"]["message"]) == (400, True)


def test_served_model_needs_the_token_and_no_session() -> None:
    sessions = ScriptedSessions()
    token = {"x-api-key": ADMIN}
    with serving(sessions, serves=True) as address, httpx2.Client(base_url=address) as http:
        for path, body in INTERFACES.items():
            served = path.removeprefix("/sessions/s1")
            assert http.post(served, headers=BEARER, json=body).status_code == 401
            reply = http.post(served, headers=token, json=body)
            assert (reply.status_code, reply.json()["id"]) == (200, f"reply-{len(sessions.requests)}")
        counted = {"input": "hello", "messages": [{"role": "user", "content": "hello"}]}
        for served in ("/v1/messages/count_tokens", "/v1/responses/input_tokens"):
            assert http.post(served, headers=BEARER, json=counted).status_code == 401
            assert http.post(served, headers=token, json=counted).json()["input_tokens"] == 10
        assert http.get("/v1/models", headers=BEARER).status_code == 401
        assert len(http.get("/v1/models", headers=token).json()["data"]) == 1
