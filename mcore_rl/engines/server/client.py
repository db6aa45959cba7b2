"""Client of a server with a teacher (teacher.url)."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from mcore_rl.config.models import TeacherConfig, TeacherSourceConfig
from mcore_rl.engines.server.interfaces import INTERFACES, AnswerError, Interface, ServerAnswer
from mcore_rl.errors import ConfigError, TeacherError
from mcore_rl.ports import TokenScorer
from mcore_rl.types import TokenScores, TokenSequence
from mcore_rl.types.json import JsonObject

MAX_MESSAGE_CHARS = 200
LONGEST_PAUSE_SECONDS = 8.0
CONNECT_SECONDS = 5.0
"""Time limit for a connection: with teacher.max_retries=3, a host that is down ends the run within 30 s."""
BUSY = (408, 429)
"""HTTP codes, besides 5xx, of requests that may succeed later."""


class _ConnectionFailedError(Exception):
    """The server did not answer, or asked to try again later."""


class RejectedError(Exception):
    """The server rejects the request, or its answer has another form."""


@dataclass
class ServerScorer:
    """A server as ports.TokenScorer. Thread-safe.

    Requests that fail because of the connection, a timeout, or a busy server are sent again; see teacher.max_retries.
    """

    config: TeacherConfig
    entry: TeacherSourceConfig
    key: str | None
    model: str
    retries: int
    _stopped: threading.Event = field(default_factory=threading.Event, init=False)
    """Set when a request has failed for good, so that the others do not wait for their own retries."""

    @property
    def interface(self) -> Interface:
        return INTERFACES[self.config.api]

    def score(self, sequences: Sequence[TokenSequence], top_k: int) -> list[TokenScores]:
        """Implement ports.TokenScorer.score: send the sequences concurrently."""
        self._stopped.clear()
        with ThreadPoolExecutor(self.config.max_concurrent_requests) as pool:
            calls = [pool.submit(self._until_stopped, sequence, top_k) for sequence in sequences]
            try:
                return [call.result().scores for call in calls]
            except BaseException as error:  # also an interrupt: the pool would wait for all its requests
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                if not isinstance(error, _ConnectionFailedError | RejectedError):
                    raise
                times = f" after {self.retries + 1} attempts" if isinstance(error, _ConnectionFailedError) else ""
                raise TeacherError(
                    f"{self.entry.given} gave no log-probabilities{times}: {error}; restart the server, and resume the "
                    "run"
                ) from None

    def ask(self, sequence: TokenSequence, top_k: int) -> ServerAnswer:
        """Send one request, and repeat it if it fails.

        Raises: _ConnectionFailedError, RejectedError.
        """
        address, body = self.interface.address(str(self.entry.url)), self.interface.body(self.model, sequence, top_k)
        for attempt in range(self.retries + 1):
            try:
                answer = call(address, self.key, self.config.timeout_seconds, body)
                break
            except _ConnectionFailedError:
                if attempt == self.retries or self._stopped.wait(min(2.0**attempt, LONGEST_PAUSE_SECONDS)):
                    raise
        try:
            return self.interface.read(answer, sequence, top_k)
        except AnswerError as error:
            raise RejectedError(f"the answer of {address} does not fit: {error}") from None
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise RejectedError(
                f"the answer of {address} has no log-probabilities in the form of teacher.api={self.config.api} "
                f"({describe(error)})"
            ) from None

    def _until_stopped(self, sequence: TokenSequence, top_k: int) -> ServerAnswer:
        if self._stopped.is_set():
            raise _ConnectionFailedError("another request has failed")
        return self.ask(sequence, top_k)


def connect(config: TeacherConfig, entry: TeacherSourceConfig, key: str | None) -> ServerScorer:
    """Return the client of the server of an entry. Asks for the model's name unless served_model is set.

    Raises: ConfigError if the server does not respond or does not serve exactly one model.
    """
    if entry.served_model is not None or config.api == "sglang":  # /generate takes no name
        return ServerScorer(config, entry, key, entry.served_model or "", config.max_retries)
    names = [name for name, _ in served_models(config, entry, key)]
    if len(names) != 1:
        raise ConfigError(
            f"{entry.given} serves {', '.join(names) or 'nothing'}; name the teacher in {entry.key('served_model')}"
        )
    return ServerScorer(config, entry, key, names[0], config.max_retries)


def served_models(config: TeacherConfig, entry: TeacherSourceConfig, key: str | None) -> list[tuple[str, int | None]]:
    """Return the models of a server with the longest sequence of each, in tokens (None: unknown).

    Raises: ConfigError if the server does not respond.
    """
    root = str(entry.url).rstrip("/")
    if config.api == "sglang":  # whose other pages need no /v1 in teacher.url
        root = f"{root.removesuffix('/v1')}/v1"
    address = f"{root}/models"
    try:
        listed = cast("list[dict[str, object]]", call(address, key, config.timeout_seconds)["data"])
        return [(str(each["id"]), cast("int | None", each.get("max_model_len"))) for each in listed]
    except (_ConnectionFailedError, RejectedError, KeyError, TypeError, AttributeError) as error:
        raise no_answer(entry, error) from None


def token_limit(scorer: ServerScorer) -> int | None:
    """Return the longest sequence of the server's model in tokens; None if the server does not list it.

    Raises: ConfigError if a server whose list has the model's name does not respond.
    """
    config, entry = scorer.config, scorer.entry
    if config.api != "sglang":
        return dict(served_models(config, entry, scorer.key)).get(scorer.model)
    try:
        listed = served_models(config, entry, scorer.key)
    except ConfigError:  # its scores do not need the list
        return None
    # The base model and its adapters, which have no limits of their own.
    return min((limit for _, limit in listed if limit is not None), default=None)


def no_answer(entry: TeacherSourceConfig, error: Exception) -> ConfigError:
    """Return the error of a server that cannot be used at the start of a run."""
    return ConfigError(
        f"{entry.given} does not answer: {describe(error)}; set it to the address of a server that returns "
        "log-probabilities of prompts, such as http://host:8000/v1, "
        "with its teacher.api and teacher.api_key_variable"
    )


def try_server(scorer: ServerScorer, sequence: TokenSequence, top_k: int) -> ServerAnswer:
    """Send one request without retries.

    Raises: ConfigError if the server does not answer it.
    """
    once = ServerScorer(scorer.config, scorer.entry, scorer.key, scorer.model, retries=0)
    try:
        return once.ask(sequence, top_k)
    except (_ConnectionFailedError, RejectedError) as error:
        raise no_answer(scorer.entry, error) from None


class _Http(http.client.HTTPConnection):
    """Connection whose timeout applies to answers; CONNECT_SECONDS apply to the connection itself."""

    def connect(self) -> None:
        _connect_quickly(self, super().connect)


class _Https(http.client.HTTPSConnection):
    """Encrypted connection, like _Http."""

    def connect(self) -> None:
        _connect_quickly(self, super().connect)


def _connect_quickly(connection: http.client.HTTPConnection, connect: Callable[[], None]) -> None:
    seconds = connection.timeout
    assert seconds is not None
    connection.timeout = min(CONNECT_SECONDS, seconds)
    connect()
    connection.sock.settimeout(seconds)


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Http, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Https, req)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes redirects errors: following them would send the API key to another host, and a POST as a GET."""

    def redirect_request(self, *_: object) -> None:
        return None


_open = urllib.request.build_opener(_HttpHandler, _HttpsHandler, _NoRedirects).open


def call(address: str, key: str | None, timeout_seconds: float, body: JsonObject | None = None) -> JsonObject:
    """Send a request (POST if it has a body) and return the answer.

    Raises: _ConnectionFailedError, RejectedError.
    """
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, headers)
    try:
        with _open(request, timeout=timeout_seconds) as response:
            return cast("JsonObject", json.load(response))
    except urllib.error.HTTPError as error:
        with error:
            text = f"{address}: HTTP {error.code} {_body(error)}"
        kind = _ConnectionFailedError if error.code >= 500 or error.code in BUSY else RejectedError
        raise kind(text) from None
    except (OSError, http.client.HTTPException) as error:  # refused, reset, timeout
        raise _ConnectionFailedError(f"{address}: {describe(error)}") from None
    except ValueError:
        raise RejectedError(f"{address} does not answer with JSON") from None


def _body(error: urllib.error.HTTPError) -> str:
    """Return the text of an error, or the target of a redirect. A connection that ends within it does not hide the
    code."""
    if error.code < 400:
        return _line(f"redirects to {error.headers['Location']}, which is not followed")
    try:
        return _line(error.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException) as failure:
        return f"({describe(failure)})"


def describe(error: Exception) -> str:
    """Return the error as one line."""
    if isinstance(error, _ConnectionFailedError | RejectedError):
        return str(error)
    return _line(f"{type(error).__name__}: {error}")


def _line(text: str) -> str:
    return " ".join(text.split())[:MAX_MESSAGE_CHARS]


if TYPE_CHECKING:
    _port: type[TokenScorer] = ServerScorer
