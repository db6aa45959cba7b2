"""Text of growing lists of tokens, against the text of all tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mcore_rl.data.tokenizer import byte_token_ids, changes_spaces, plain_decoder
from mcore_rl.data.transcripts import response_text
from mcore_rl.engines.stop_strings import StopScanner
from mcore_rl.rollout.gateway.settled_text import SettledText, StopGate
from tests.unit.data.chat import made

BATCHES = st.lists(st.integers(1, 5), min_size=1, max_size=3)
BYTES = "é€😀ab ".encode()


@functools.cache
def byte_level() -> Any:
    return made.tokenizer(None)


@functools.cache
def sentencepiece() -> Any:
    """Return a tokenizer whose tokens are words with a leading space, and bytes."""
    names = ["<unk>", "</s>", "▁a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.Unigram([(name, 0.0) for name in names], unk_id=0, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def settled(tokenizer: Any, ids: list[int], batches: list[int]) -> str:
    text = SettledText(lambda part: tokenizer.decode(part, skip_special_tokens=True), byte_token_ids(tokenizer))
    found, place, number = "", 0, 0
    while place < len(ids):
        size = batches[number % len(batches)]
        found += text.add(ids[place : place + size])
        place, number = place + size, number + 1
    return found


def token_of(tokenizer: Any, byte: int) -> int:
    """Return the token of a byte."""
    if byte_token_ids(tokenizer):
        return int(tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>"))
    ids = tokenizer.encode("é€😀ab ", add_special_tokens=False)
    return int(ids["é€😀ab ".encode().index(byte)])


@settings(max_examples=200, deadline=None)
@given(data=st.lists(st.sampled_from(BYTES), max_size=30), end=st.booleans(), sizes=BATCHES)
@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["bytes", "sentencepiece"])
def test_pieces_concatenate_to_the_text_of_all_tokens(
    tokenizer: Any, data: list[int], end: bool, sizes: list[int]
) -> None:
    ids = [token_of(tokenizer, byte) for byte in data]
    ids += [tokenizer.eos_token_id, token_of(tokenizer, ord("a"))] if end else []
    if byte_token_ids(tokenizer):
        ids += tokenizer.convert_tokens_to_ids(["▁a", "c", "▁b"])
    whole, found = tokenizer.decode(ids, skip_special_tokens=True), settled(tokenizer, ids, sizes)
    assert whole.startswith(found)
    assert whole == found or not whole[-4:].isascii(), "only the last character may be incomplete"


def test_a_character_is_returned_when_its_last_token_arrives() -> None:
    tokenizer = byte_level()
    text = SettledText(tokenizer.decode)
    ids = tokenizer.encode("a😀b", add_special_tokens=False)
    assert [text.add([token]) for token in ids] == ["a", "", "", "", "😀", "b"]


def test_no_tokenizer_with_bpe_changes_spaces() -> None:
    tokenizer = sentencepiece()
    assert not changes_spaces(tokenizer)
    tokenizer.clean_up_tokenization_spaces = True
    assert changes_spaces(tokenizer)
    tokenizer.clean_up_tokenization_spaces = False
    other = made.tokenizer(None)
    other.clean_up_tokenization_spaces = True
    assert not changes_spaces(other)


TEXTS = st.text("ab#é", max_size=14)
STOPS = st.lists(st.text("ab#é", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, stops=STOPS, special=st.integers(0, 14))
def test_no_part_of_a_stop_string_passes(text: str, stops: list[str], special: int) -> None:
    """The engine's scanner ends the response, and the text of graders leaves the stop string out."""
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids.insert(special, tokenizer.convert_tokens_to_ids("<tool_call>"))
    scanner = StopScanner(stops, plain_decoder(tokenizer))
    end = next((place for place, token in enumerate(ids, start=1) if scanner.add(token)), None)
    gate, passed = StopGate(stops, SettledText(plain_decoder(tokenizer))), list[int]()
    for token in ids[:end]:
        passed += gate.add([token])
    assert passed == ids[: len(passed)]
    whole = response_text(tokenizer, ids[:end], stops)
    assert whole.startswith(tokenizer.decode(passed, skip_special_tokens=True).rstrip("\ufffd"))
    plain = plain_decoder(tokenizer)(ids)
    may_stop = any(plain.endswith(stop[:n]) for stop in stops for n in range(1, len(stop)))
    if end is None and not may_stop and not plain.endswith("\ufffd"):
        assert passed == ids, "nothing is held without a cause"
