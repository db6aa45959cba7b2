"""The gateway's HTTP server: sessions behind OpenAI's and Anthropic's interfaces.

    POST   /sessions                             take a session: {"id", "key", "owner_key", "row"}; 204 if there is none
    POST   /sessions/<id>/reward                 {"reward": number, "call": id of a reply or null}
    GET    /sessions/<id>?seconds=10             wait for the end of a session: {"ended": true or false}
    DELETE /sessions/<id>                        end a session: {"extra": {...}, "error": text or null}
    POST   /sessions/<id>/v1/chat/completions    and /v1/completions, /v1/responses, /v1/messages
    POST   /sessions/<id>/v1/messages/count_tokens    and /v1/responses/input_tokens
    GET    /sessions/<id>/v1/models
    POST   /v1/chat/completions ...              the same without sessions, if the model is served
    GET    /health

Every session has a key for the model, and another one for its reward and its end (exchange.OpenedSession). Clients send
them as `Authorization: Bearer KEY` or `x-api-key: KEY`.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Protocol

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from mcore_rl.data.json_text import to_plain
from mcore_rl.rollout.gateway.answering import Answering, ClientLeftError, json_response, refusal, unless_left
from mcore_rl.rollout.gateway.bodies import json_body
from mcore_rl.rollout.gateway.dialects import chat_completions, completions, messages, responses
from mcore_rl.rollout.gateway.dialects.fields import Fields
from mcore_rl.rollout.gateway.dialects.interface import Call, Dialect, json_bytes
from mcore_rl.rollout.gateway.exchange import (
    MAX_REWARD,
    ChatReply,
    ChatRequest,
    HarnessEnd,
    RefusedError,
    Reward,
    Sessions,
)
from mcore_rl.rollout.gateway.histories import Histories
from mcore_rl.rollout.gateway.progress import ProgressReceiver
from mcore_rl.types.json import JsonObject

DIALECTS = (chat_completions.DIALECT, completions.DIALECT, responses.DIALECT, messages.DIALECT)
MAX_WAIT_SECONDS = 60.0
"""Maximum time for which a request for a session waits; clients ask again."""
NO_SESSION = ""
RETRIES = "x-stainless-retry-count"
"""Header of the clients of OpenAI and Anthropic: how often they have repeated the request after an error."""
_Seconds = Annotated[float, Query(ge=0, le=MAX_WAIT_SECONDS)]


def application(
    sessions: Sessions, *, model: str, admin_token: str | None, max_body_bytes: int, serves: bool = False
) -> FastAPI:
    """Return the server as an ASGI application.

    model: name of the model in replies.
    admin_token: key that takes sessions, and rewards and ends all of them; None: nobody takes sessions over HTTP.
    max_body_bytes: larger bodies are refused with status 413 before they are read.
    serves: answer requests without a session, whose key is admin_token.
    """
    app = FastAPI(title="mcore-rl gateway", openapi_url=None, docs_url=None, redoc_url=None)
    server = _Server(sessions, model, admin_token, max_body_bytes)
    in_session = "/sessions/{session}"
    # Routes of Starlette: every handler reads its request itself, and those of FastAPI made every call 20 % slower.
    for dialect in DIALECTS:
        app.add_route(in_session + dialect.path, server.endpoint(dialect), ["POST"])
        if serves:
            app.add_route(dialect.path, server.served(dialect), ["POST"])
        if dialect.count_path is not None:
            app.add_route(in_session + dialect.count_path, server.counter(dialect), ["POST"])
        if serves and dialect.count_path is not None:
            app.add_route(dialect.count_path, server.served_counter(dialect), ["POST"])
    if serves:
        app.add_route("/v1/models", server.served_models, ["GET"])
    app.add_route(f"{in_session}/v1/models", server.models, ["GET"])
    app.add_route("/sessions", server.take, ["POST"])
    app.add_route(f"{in_session}/reward", server.reward, ["POST"])
    app.add_route(in_session, server.end, ["DELETE"])
    app.add_api_route(in_session, server.wait, methods=["GET"])
    app.add_route("/health", _health, ["GET"])
    app.add_exception_handler(RefusedError, _on_refusal)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_query)
    app.add_exception_handler(Exception, _on_failure)  # the exception is raised again, for the server's log
    return app


class Ask(Protocol):
    """Answers a request; see Sessions.answer."""

    def __call__(self, request: ChatRequest, *, receiver: ProgressReceiver) -> Awaitable[ChatReply]: ...


class _Server:
    """Handlers of the routes."""

    def __init__(self, sessions: Sessions, model: str, admin_token: str | None, max_body_bytes: int) -> None:
        self._sessions, self._model, self._admin, self._max_bytes = sessions, model, admin_token, max_body_bytes
        self._histories = Histories(lambda name: name == NO_SESSION or sessions.key_of(name) is not None)

    def endpoint(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a dialect's requests in a session."""

        async def handle(request: Request) -> Response:
            session = _session_of(request)
            self._check_key(request, self._sessions.key_of(session))
            ask = partial(self._sessions.answer, session, retried=_is_retried(request))
            return await self._answering(dialect, request, session, ask)

        return handle

    def served(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of a dialect's requests without a session. All of them share the replies that
        /v1/responses continues."""

        async def handle(request: Request) -> Response:
            self._check_key(request)
            return await self._answering(dialect, request, NO_SESSION, self._sessions.serve)

        return handle

    def counter(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        """Return the handler of requests that count the tokens of a prompt in a session."""

        async def handle(request: Request) -> Response:
            session = _session_of(request)
            self._check_key(request, self._sessions.key_of(session))
            return await self._counted(dialect, request, session, session)

        return handle

    def served_counter(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        """Same as `counter`, without a session."""

        async def handle(request: Request) -> Response:
            self._check_key(request)
            return await self._counted(dialect, request, NO_SESSION, None)

        return handle

    async def _counted(self, dialect: Dialect, request: Request, history: str, session: str | None) -> Response:
        call = await self._call(dialect, request, history)
        return _json(dialect.counted(await self._sessions.count(session, call.request)))

    async def _call(self, dialect: Dialect, request: Request, session: str) -> Call:
        body = await json_body(request, self._max_bytes)
        return dialect.read(body, self._model, lambda reply: self._histories.find(session, reply))

    async def _answering(self, dialect: Dialect, request: Request, session: str, ask: Ask) -> Response:
        call = await self._call(dialect, request, session)

        async def answer(receiver: ProgressReceiver) -> ChatReply:
            reply = await ask(call.request, receiver=receiver)
            if conversation := call.conversation(reply):
                self._histories.keep(session, reply.id, conversation)
            return reply

        async def missed(reply: ChatReply) -> None:
            if session != NO_SESSION:
                await self._sessions.missed(session, reply.id)

        return Answering(dialect, call, answer, missed)

    async def served_models(self, request: Request) -> Response:
        """Same as `models`, without a session."""
        self._check_key(request)
        return self._models()

    async def models(self, request: Request) -> Response:
        """List the model, in a form that the clients of both vendors read."""
        self._check_key(request, self._sessions.key_of(_session_of(request)))
        return self._models()

    def _models(self) -> Response:
        model: JsonObject = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "mcore-rl",
            "type": "model",
            "display_name": self._model,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
        }
        ends: JsonObject = {"first_id": self._model, "last_id": self._model, "has_more": False}
        return _json({"object": "list", "data": [model], **ends})

    async def take(self, request: Request) -> Response:
        """Give a session to a client that asks for work; {"seconds": 10} waits for one."""
        if self._admin is None:
            raise RefusedError(403, "this server gives no sessions to clients: it has no token for them")
        self._check_key(request)
        fields = Fields(await json_body(request, self._max_bytes))
        try:
            opened = await unless_left(request, self._sessions.take(fields.number("seconds", 0, MAX_WAIT_SECONDS) or 0))
        except ClientLeftError:
            return Response(status_code=499)  # nobody reads it
        if opened is None:
            return Response(status_code=204)
        keys: JsonObject = {"key": opened.key, "owner_key": opened.owner_key}
        return _json({"id": opened.id, **keys, "row": to_plain(opened.row)})

    async def reward(self, request: Request) -> Response:
        """Add a reward to a session or to one of its replies."""
        session = _session_of(request)
        self._check_key(request, self._sessions.owner_key_of(session))
        fields = Fields(await json_body(request, self._max_bytes))
        value = fields.number("reward", -MAX_REWARD, MAX_REWARD)
        if value is None:
            raise fields.wrong("reward", "a number")
        await self._sessions.reward(session, Reward(value, fields.text("call", "") or None))
        return _json({})

    async def wait(self, session: str, request: Request, seconds: _Seconds = 0) -> Response:
        """Wait for the end of a session."""
        self._check_key(request, self._sessions.owner_key_of(session))
        try:
            ended = await unless_left(request, self._sessions.closed(session, seconds))
        except ClientLeftError:
            return Response(status_code=499)  # nobody reads it
        return _json({"ended": ended})

    async def end(self, request: Request) -> Response:
        """End a session."""
        session = _session_of(request)
        self._check_key(request, self._sessions.owner_key_of(session))
        fields = Fields(await json_body(request, self._max_bytes))
        extra = fields.get("extra") or {}
        if not isinstance(extra, dict):
            raise fields.wrong("extra", "an object")
        await self._sessions.end(session, HarnessEnd(extra, fields.text("error", "") or None))
        return _json({})

    def _check_key(self, request: Request, expected: str | None = None) -> None:
        """Raise RefusedError unless the request has the expected key or the server's token.

        Unknown sessions and wrong keys have the same error in the same time, so that sessions cannot be listed.
        """
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = [token.strip() if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
        # A key that nobody has stands for a missing one.
        accepted = [expected or secrets.token_hex(), self._admin or secrets.token_hex()]
        # A list: `any` of a generator would stop at the first match.
        equal = [hmac.compare_digest(each.encode(), key.encode()) for each in given for key in accepted]
        if not any(equal):
            text = (
                "no such session, or a wrong key: send the session's key as `Authorization: Bearer KEY` or `x-api-key`"
            )
            raise RefusedError(401, text, "invalid_api_key")


def _session_of(request: Request) -> str:
    return str(request.path_params["session"])


def _is_retried(request: Request) -> bool:
    """Return True if a client repeats a request by itself, which the clients of both vendors announce."""
    return request.headers.get(RETRIES, "0") not in ("", "0")


async def _health(request: Request) -> Response:
    return _json({"status": "ok"})


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return refusal(_dialect_of(request), error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    return refusal(_dialect_of(request), RefusedError(error.status_code, f"{what}: {error.detail}"))


async def _on_invalid_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    text = "; ".join(f"{each['loc'][-1]}: {each['msg']}" for each in error.errors())
    return refusal(_dialect_of(request), RefusedError(400, text))


async def _on_failure(request: Request, error: Exception) -> Response:
    return refusal(_dialect_of(request), RefusedError(500, "the server failed; its log has the error"))


def _dialect_of(request: Request) -> Dialect:
    """Return the dialect of a path; OpenAI's for other paths."""
    path = request.url.path
    return messages.DIALECT if messages.DIALECT.path in path else chat_completions.DIALECT


def _json(value: JsonObject) -> Response:
    return json_response(200, json_bytes(value))
