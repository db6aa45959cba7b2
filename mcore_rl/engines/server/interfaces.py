"""Requests for the log-probabilities of given tokens, and their answers, in the interfaces of several servers.

| teacher.api | request | answer |
|---|---|---|
| vllm | POST URL/completions with prompt_logprobs | a table of token ids for each token |
| sglang | POST /generate at the server's root, with logprob_start_len | (logp, id, text) of each token |
| completions | POST URL/completions with echo and logprobs | text and logp of each token |

All of them get token ids. Their log-probabilities are at temperature 1, over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, cast
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from mcore_rl.types import TokenScores, TokenSequence
from mcore_rl.types.json import JsonObject

LISTED = 1
"""Number of most probable tokens that are requested at least: servers return none without it."""


class _VllmToken(TypedDict):
    logprob: float
    rank: int
    decoded_token: str | None


class _Echo(TypedDict):
    tokens: list[str | None]
    token_logprobs: list[float]


class _Choice(TypedDict):
    """An entry of `choices` in the answer of /completions."""

    prompt_logprobs: list[dict[str, _VllmToken]]
    logprobs: _Echo


class AnswerError(Exception):
    """An answer has no log-probabilities of the tokens that were sent; the message names the difference."""


@dataclass(frozen=True)
class ServerAnswer:
    """Scores of the requested tokens, and the text of each of them; None for a token without text."""

    scores: TokenScores
    texts: list[str | None]


class Interface(Protocol):
    """A kind of server."""

    def address(self, url: str) -> str:
        """Return the address of the requests to the server at teacher.url."""

    def body(self, model: str, sequence: TokenSequence, top_k: int) -> JsonObject:
        """Return the body of a request."""

    def read(self, answer: JsonObject, sequence: TokenSequence, top_k: int) -> ServerAnswer:
        """Read an answer.

        Raises: AnswerError; KeyError, TypeError, IndexError or ValueError for an answer in another form.
        """


class VllmInterface:
    """Completions of vLLM, with its prompt_logprobs."""

    def address(self, url: str) -> str:
        return f"{url.rstrip('/')}/completions"

    def body(self, model: str, sequence: TokenSequence, top_k: int) -> JsonObject:
        return _completion(model, sequence) | {"prompt_logprobs": max(top_k, LISTED)}

    def read(self, answer: JsonObject, sequence: TokenSequence, top_k: int) -> ServerAnswer:
        tables = _choice(answer)["prompt_logprobs"]
        _check_length(len(tables), sequence)
        rows, texts = [], []
        for token, table in zip(_wanted(sequence), tables[sequence.start :], strict=True):
            # The token itself, and the most probable tokens, which may contain it.
            if str(token) not in table:
                raise AnswerError(f"it has no log-probability of token {token}")
            ranked = sorted(table.items(), key=lambda item: item[1]["rank"])
            rows.append((table[str(token)]["logprob"], [(int(key), each["logprob"]) for key, each in ranked[:top_k]]))
            texts.append(table[str(token)].get("decoded_token"))
        return ServerAnswer(_scores(rows, top_k), texts)


class SglangInterface:
    """SGLang's own interface."""

    def address(self, url: str) -> str:
        scheme, host, path, *_ = urlsplit(url)
        return urlunsplit((scheme, host, path.rstrip("/").removesuffix("/v1") + "/generate", "", ""))

    def body(self, model: str, sequence: TokenSequence, top_k: int) -> JsonObject:
        return {
            "input_ids": sequence.token_ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            # The first entry has no log-probability, because it has no context.
            "logprob_start_len": sequence.start - 1,
            "top_logprobs_num": top_k,
            "return_text_in_logprobs": True,
        }

    def read(self, answer: JsonObject, sequence: TokenSequence, top_k: int) -> ServerAnswer:
        information = cast("Mapping[str, list[object]]", answer["meta_info"])
        entries = cast("list[tuple[float, int, str | None]]", information["input_token_logprobs"])[1:]
        tops = information["input_top_logprobs"][1:] if top_k else [[] for _ in entries]
        wanted = _wanted(sequence)
        if [token for _, token, _ in entries] != wanted:
            raise AnswerError(f"its {len(entries)} token ids are not the {len(wanted)} that were sent")
        listed = cast("list[list[tuple[float, int, str | None]]]", tops)
        rows = [
            (logp, [(token, of_token) for of_token, token, _ in most])
            for (logp, _, _), most in zip(entries, listed, strict=True)
        ]
        return ServerAnswer(_scores(rows, top_k), [text for _, _, text in entries])


class CompletionsInterface:
    """Completions of any server that supports echo with logprobs. It returns no token ids."""

    def address(self, url: str) -> str:
        return f"{url.rstrip('/')}/completions"

    def body(self, model: str, sequence: TokenSequence, top_k: int) -> JsonObject:
        return _completion(model, sequence) | {"echo": True, "logprobs": LISTED}

    def read(self, answer: JsonObject, sequence: TokenSequence, top_k: int) -> ServerAnswer:
        assert not top_k, "rejected by config.rules.teacher"
        found = _choice(answer)["logprobs"]
        values, end = found["token_logprobs"], len(sequence.token_ids)
        # The last value belongs to the token that the server samples.
        _check_length(min(len(values), end), sequence)
        rows: list[_Row] = [(value, []) for value in values[sequence.start : end]]
        return ServerAnswer(_scores(rows, 0), found["tokens"][sequence.start : end])


INTERFACES: Mapping[str, Interface] = {
    "vllm": VllmInterface(),
    "sglang": SglangInterface(),
    "completions": CompletionsInterface(),
}
"""Interfaces by teacher.api."""

_Row = tuple[float, list[tuple[int, float]]]
"""Log-probability of a token, and the most probable tokens with theirs."""


def _completion(model: str, sequence: TokenSequence) -> JsonObject:
    return {"model": model, "prompt": sequence.token_ids.tolist(), "max_tokens": 1, "temperature": 0.0}


def _choice(answer: JsonObject) -> _Choice:
    (choice,) = cast("list[_Choice]", answer["choices"])
    return choice


def _wanted(sequence: TokenSequence) -> list[int]:
    wanted: list[int] = sequence.token_ids[sequence.start :].tolist()
    return wanted


def _check_length(found: int, sequence: TokenSequence) -> None:
    if found != len(sequence.token_ids):
        raise AnswerError(f"it has {found} tokens, not the {len(sequence.token_ids)} that were sent")


def _scores(rows: Sequence[_Row], top_k: int) -> TokenScores:
    if any(len(most) < top_k for _, most in rows):
        raise AnswerError(f"it has fewer than {top_k} most probable tokens")
    logp = np.array([value for value, _ in rows], np.float64)
    shape = (len(rows), top_k)
    ids = np.array([[token for token, _ in most] for _, most in rows], np.int64).reshape(shape)
    top = np.array([[value for _, value in most] for _, most in rows], np.float64).reshape(shape)
    return TokenScores.of(logp, ids, top)
