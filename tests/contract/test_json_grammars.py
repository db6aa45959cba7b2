"""Grammars of formats without an engine: texts that are sampled from them conform to the schemas."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mcore_rl.engines.grammars import compiler as compilers
from mcore_rl.engines.grammars.compiler import FormatCompiler
from mcore_rl.engines.grammars.matcher import FormatMatcher, allocate
from mcore_rl.errors import DataError
from mcore_rl.types import JsonFormat
from tests.byte_tokenizer import CLOSE, EOS, byte_tokenizer
from tests.contract.format_schemas import SCHEMAS, AllowedTokens, conforms, form_of

VOCAB_SIZE, MOST = 288, 150
TAGS = ("<think>", "</think>")
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def compiler() -> FormatCompiler:
    return FormatCompiler(TOKENIZER, VOCAB_SIZE, [EOS])


def next_tokens(matcher: FormatMatcher) -> list[int]:
    row = allocate(1, VOCAB_SIZE)
    matcher.fill_bitmask(row, 0)
    return np.flatnonzero(np.unpackbits(row.numpy().view(np.uint8), bitorder="little")[:VOCAB_SIZE]).tolist()


def sample(matcher: FormatMatcher, rng: random.Random) -> list[int]:
    """Sample tokens, more and more often such that close a part of JSON; at most MOST."""
    closing, tokens = {EOS, *TOKENIZER.convert_tokens_to_ids(list('"}],:'))}, list[int]()
    while not matcher.is_terminated() and len(tokens) < MOST:
        found = next_tokens(matcher)
        ends = [token for token in found if token in closing]
        tokens.append(rng.choice(ends if ends and rng.random() < 0.2 + len(tokens) / MOST else found))
        assert matcher.accept_tokens("", [tokens[-1]])
    return tokens


@pytest.mark.parametrize("name", SCHEMAS)
def test_sampled_texts_conform_to_the_schema(compiler: FormatCompiler, name: str) -> None:
    rng, complete, allowed = random.Random(3), 0, AllowedTokens(TOKENIZER, VOCAB_SIZE)
    for number in range(30):
        tokens = sample(compiler.matcher(form_of(name), []), rng)
        if tokens[-1] == EOS:
            text = TOKENIZER.decode(tokens[:-1], skip_special_tokens=False)
            assert "\ufffd" not in text
            assert conforms(name, text), text
            complete += 1
        if number < 4:
            matcher = compiler.matcher(form_of(name), [])
            for token, row in zip(tokens, allowed.sets(form_of(name), tuple(tokens)), strict=True):
                assert next_tokens(matcher) == np.flatnonzero(row).tolist()
                matcher.accept_tokens("", [token])
    assert complete > 10


def test_reasoning_precedes_the_json_unless_it_is_absent(compiler: FormatCompiler) -> None:
    form = JsonFormat('{"enum": [12]}', TAGS)
    for text, accepted in [
        ("12", True),
        ("<think>so {}</think>\n12", True),
        ("so</think>12", False),
        ("1<think>", False),
    ]:
        matcher = compiler.matcher(form, [])
        assert (matcher.accept_tokens("", [*TOKENIZER.encode(text), EOS])) is accepted
    opened = replace(form, in_thought=True)
    for text, accepted in [("so <b> </think>12", True), ("12", False)]:
        assert (compiler.matcher(opened, []).accept_tokens("", [*TOKENIZER.encode(text), EOS])) is accepted
    assert CLOSE in next_tokens(compiler.matcher(opened, []))


def test_matcher_over_partial_tokens_continues_the_text(compiler: FormatCompiler) -> None:
    form, rng = form_of("person"), random.Random(1)
    whole = compiler.matcher(form, [])
    begun = list[int]()
    for _ in range(12):
        assert next_tokens(compiler.matcher(form, begun)) == next_tokens(whole)
        begun.append(rng.choice(next_tokens(whole)))
        whole.accept_tokens("", begun[-1:])
    with pytest.raises(DataError, match="leaves its format at token 0"):
        compiler.matcher(form_of("number"), begun)


def test_drafts_are_cut_where_they_leave_the_format(compiler: FormatCompiler) -> None:
    matcher = compiler.matcher(JsonFormat('{"enum": ["ab"]}'), [])
    good = TOKENIZER.encode('"ab"')
    assert matcher.validate_tokens([*good, EOS, EOS]) == [*good, EOS]
    assert matcher.validate_tokens([good[0], *TOKENIZER.encode("x")]) == good[:1]
    # A surrogate is no character: 0xED must be followed by 0x80 to 0x9F.
    string = compiler.matcher(JsonFormat('{"type": "string"}'), TOKENIZER.encode('"'))
    first, second = (TOKENIZER.convert_tokens_to_ids(each) for each in ("í", "±"))
    assert string.validate_tokens([first, second]) == [first]
    assert next_tokens(matcher) == next_tokens(compiler.matcher(JsonFormat('{"enum": ["ab"]}'), []))


def test_place_where_nothing_may_follow_ends_the_response(compiler: FormatCompiler) -> None:
    """Otherwise the sampler would get a row without tokens, and all requests of the pass would fail."""
    form = JsonFormat(r'{"type": "string", "pattern": "^a[^\\s\\S]$"}')
    matcher = compiler.matcher(form, TOKENIZER.encode('"a'))
    assert next_tokens(matcher) == [EOS]
    assert matcher.validate_tokens([EOS]) == [EOS]
    assert not matcher.is_terminated()
    assert matcher.accept_tokens("", [EOS])
    assert matcher.is_terminated()
    assert not compiler.matcher(form, TOKENIZER.encode('"')).accept_tokens("", [EOS])


def test_special_tokens_are_never_allowed(compiler: FormatCompiler) -> None:
    string = compiler.matcher(JsonFormat('{"type": "string"}', TAGS, in_thought=True), [])
    special = {0, 2}
    assert not special & set(next_tokens(string))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"type": "integer", "minimum": 5, "maximum": 4}', "Invalid range: minimum greater than maximum"),
        ('{"type": "string", "pattern": "^a\\\\b"}', "Word boundary is not supported"),
    ],
)
def test_fault_of_a_schema_is_named(compiler: FormatCompiler, schema: str, reason: str) -> None:
    with pytest.raises(DataError, match=f"the format cannot be compiled: .*{reason}"):
        compiler.prepare(JsonFormat(schema))


def test_tokenizer_without_bytes_is_refused() -> None:
    from tests.contract.gateway_session import drifting_tokenizer

    with pytest.raises(DataError, match="does not have a token for every byte"):
        FormatCompiler(drifting_tokenizer(), 96, [1]).prepare(JsonFormat())
    with pytest.raises(DataError, match="no token that ends a response"):
        FormatCompiler(TOKENIZER, VOCAB_SIZE, []).prepare(JsonFormat())
    with pytest.raises(DataError, match="has no tokenizer"):
        FormatCompiler(None, VOCAB_SIZE, [EOS]).prepare(JsonFormat())


def test_slow_compilation_is_refused_and_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, release, original = FormatCompiler(TOKENIZER, VOCAB_SIZE, [EOS], 0.2), threading.Event(), grammar_of()
    calls: list[JsonFormat] = []

    def slow(form: JsonFormat) -> Any:
        calls.append(form)
        if form.schema == "{}":
            release.wait(20)
        return original(form)

    monkeypatch.setattr(compilers, "grammar_of", slow)
    with pytest.raises(DataError, match=r"was not compiled within 0\.2 s"):
        compiler.prepare(JsonFormat("{}"))
    compiler._max_seconds = 20
    compiler.prepare(JsonFormat())
    began = time.monotonic()
    release.set()
    compiler.prepare(JsonFormat("{}"))
    assert time.monotonic() - began < 15
    assert calls == [JsonFormat("{}"), JsonFormat()]  # each once


def grammar_of() -> Callable[[JsonFormat], Any]:
    return compilers.grammar_of


def numbered(number: int) -> JsonFormat:
    return JsonFormat(json.dumps({"enum": [number]}))


def test_last_used_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "MAX_GRAMMARS", 2)
    compiler = FormatCompiler(TOKENIZER, VOCAB_SIZE, [EOS])
    kept = compiler.prepare(numbered(0))
    compiler.prepare(numbered(1))
    assert compiler.prepare(numbered(0)) is kept
    for number in (2, 3, 0, 4):
        compiler.prepare(numbered(number))
    assert list(compiler._grammars)[-2:] == [numbered(0), numbered(4)]
    assert len(compiler._grammars) <= 3


def test_grammar_of_a_format_in_use_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the engine would compile it between two steps, when it continues a paused response."""
    monkeypatch.setattr(compilers, "MAX_GRAMMARS", 1)
    compiler, held = FormatCompiler(TOKENIZER, VOCAB_SIZE, [EOS]), numbered(0)
    kept = compiler.prepare(held)
    for number in range(1, 6):
        compiler.prepare(numbered(number))
    assert compiler.prepare(replace(held)) is kept
    del held
    for number in range(1, 6):
        compiler.prepare(numbered(number))
    assert numbered(0) not in compiler._grammars
