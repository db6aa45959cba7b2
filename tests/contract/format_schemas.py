"""Schemas of replies, and the tokens that they allow, computed apart from the engine."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import numpy as np

from mcore_rl.rollout.gateway.formats.schemas import engine_schema
from mcore_rl.types import JsonFormat
from tests.byte_tokenizer import EOS

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["cat", "dog", None]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind"],
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "choice": {"enum": ["é", 12, {"a": [True]}]},
    "number": {"type": "number", "minimum": -1.5, "maximum": 17.25},
    "pair": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "minItems": 2, "items": False},
    "date": {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]},
    "code": {"type": "string", "pattern": "^[a-c]{2,3}-\\d+$"},
    "union": {"anyOf": [{"type": "integer", "minimum": 990}, {"type": "null"}]},
    "tree": {
        "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}},
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/n"}},
        "required": ["root"],
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer", "maximum": 3}},
    "any": {},
    "bounded": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {"type": "string", "minLength": 1, "maxLength": 3},
    },
    "blank": {"type": "string", "pattern": r"^\s[ -~]\w[^a]$"},
}


def form_of(name: str) -> JsonFormat:
    return JsonFormat(engine_schema(SCHEMAS[name], name))


class AllowedTokens:
    """Tokens that may follow: by xgrammar with its own reading of the tokenizer, without special tokens, and so that
    the bytes begin a text of UTF-8."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[EOS])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self.vocab_size, self.texts = vocab_size, [bytes(text) for text in info.decoded_vocab]
        self._special = [*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids(["<tool>"])]

    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def sets(self, form: JsonFormat, token_ids: tuple[int, ...]) -> np.ndarray:
        """Return the allowed tokens before each token of a response. Shapes: bool [T, V]."""
        import xgrammar

        grammar = xgrammar.Grammar.from_json_schema(form.schema, max_whitespace_cnt=32)
        # Strings with a length limit: JSON has no control characters in strings.
        text = str(grammar).replace('[^\\"\\\\\\r\\n]', '[^\\"\\\\\\0-\\x1f]')
        matcher = xgrammar.GrammarMatcher(self._compiler.compile_grammar(xgrammar.Grammar.from_ebnf(text)))
        found, written = np.zeros((len(token_ids), self.vocab_size), bool), b""
        for place, token in enumerate(token_ids):
            row = xgrammar.allocate_token_bitmask(1, self.vocab_size)
            matcher.fill_next_token_bitmask(row, 0)
            bits = np.unpackbits(row.numpy().view(np.uint8), bitorder="little")[: self.vocab_size].astype(bool)
            tail = incomplete(written)
            for each in np.flatnonzero(bits):
                bits[each] = each == EOS or (each not in self._special and begins_utf8(tail, self.texts[each]))
            found[place] = bits
            assert matcher.accept_token(token)
            written += self.texts[token] if token != EOS else b""
        return found


@functools.lru_cache(maxsize=1 << 16)
def begins_utf8(tail: bytes, text: bytes) -> bool:
    """Return whether a text of UTF-8 can continue with `text` behind an incomplete character."""
    return any(_is_whole(tail + text + rest) for rest in RESTS)


def incomplete(text: bytes) -> bytes:
    """Return the bytes of an incomplete character at the end of a text."""
    tail = text[-3:].lstrip(bytes(range(0x80, 0xC0)))
    return next(
        (tail[place:] for place in range(len(tail)) if not _is_whole(tail[place:]) and tail[place] >= 0xC0), b""
    )


RESTS = tuple(bytes(rest) for count in range(4) for rest in itertools.product((0x80, 0x90, 0xA0), repeat=count))
"""Bytes of which some complete any begun character."""


def _is_whole(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def conforms(name: str, text: str) -> bool:
    """Return whether a text is JSON of a schema."""
    from jsonschema import Draft202012Validator

    return bool(Draft202012Validator(SCHEMAS[name]).is_valid(json.loads(text)))
