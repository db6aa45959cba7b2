"""Text of growing lists of tokens, against the text of all tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
from tests.unit.rollout.counted_text import CountedText

BATCHES = st.lists(st.integers(1, 5), min_size=1, max_size=3)
BYTES = "é€😀ab ".encode()


@functools.cache
def byte_level() -> Any:
    return made.tokenizer(None)


@functools.cache
def sentencepiece() -> Any:
    """Return a tokenizer whose tokens are words with a leading space, and bytes."""
    names = ["<unk>", "</s>", "▁", "▁a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
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
@given(data=st.lists(st.sampled_from([*BYTES, None]), max_size=30), end=st.booleans(), sizes=BATCHES)
@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["bytes", "sentencepiece"])
def test_pieces_concatenate_to_the_text_of_all_tokens(
    tokenizer: Any, data: list[int | None], end: bool, sizes: list[int]
) -> None:
    """None: a special token, which has no text."""
    ids = [tokenizer.eos_token_id if byte is None else token_of(tokenizer, byte) for byte in data]
    ids += [tokenizer.eos_token_id, token_of(tokenizer, ord("a"))] if end else []
    if byte_token_ids(tokenizer):
        ids += tokenizer.convert_tokens_to_ids(["▁a", "c", "▁b"])
    whole, found = tokenizer.decode(ids, skip_special_tokens=True), settled(tokenizer, ids, sizes)
    assert whole.startswith(found)
    assert whole == found or not whole[-4:].isascii(), "only the last character may be incomplete"


@settings(max_examples=1000, deadline=None)
@given(
    text=st.lists(st.sampled_from(["a", "é", "€", "😀"]), max_size=16),
    sizes=st.lists(st.integers(1, 5), min_size=16, max_size=64),
    wrong=st.none() | st.integers(0, 40),
)
def test_tokens_may_end_one_character_and_begin_the_next(text: list[str], sizes: list[int], wrong: int | None) -> None:
    """wrong: place of a byte that is left out."""
    rest, pieces = bytearray("".join(text).encode()), list[bytes]()
    if wrong is not None:
        del rest[wrong : wrong + 1]
    for size in sizes:
        pieces.append(bytes(rest[:size]))
        del rest[:size]
    pieces = [piece for piece in [*pieces, bytes(rest)] if piece]

    def decode(token_ids: Sequence[int]) -> str:
        return b"".join(pieces[token] for token in token_ids).decode(errors="replace")

    settled_text = SettledText(decode)
    found = "".join(settled_text.add([token]) for token in range(len(pieces)))
    assert decode(range(len(pieces))).startswith(found)
    # The last three tokens may begin a character.
    assert found.startswith(decode(range(len(pieces) - 3)).rstrip("\ufffd"))


class CountedDecoder:
    """Decoder that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any, *, skips: bool) -> None:
        self._tokenizer, self._skips = tokenizer, skips
        self.num_decoded = 0

    def __call__(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skips))


@pytest.mark.parametrize("batch", [1, 300])
@pytest.mark.parametrize("unit", [[ord("a")], [None], [0x98], [0xF0, 0x9F], [0xC3, None], [None, ord("a")], ["▁"]])
@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["bytes", "sentencepiece"])
def test_a_token_is_decoded_a_limited_number_of_times(tokenizer: Any, unit: list[Any], batch: int) -> None:
    """A long context may precede special tokens, a run of bytes that are no characters, or a run of spaces."""
    texts = {None: tokenizer.eos_token_id, "▁": token_of(tokenizer, ord(" "))}
    if byte_token_ids(tokenizer):
        texts["▁"] = tokenizer.convert_tokens_to_ids("▁")
    ids = [texts.get(each) or token_of(tokenizer, each) for each in unit] * (600 // len(unit))
    decode = CountedDecoder(tokenizer, skips=True)
    text, found = SettledText(decode, byte_token_ids(tokenizer)), ""
    found += text.add(ids[:batch])
    for token in ids[batch:]:
        found += text.add([token])
    assert decode.num_decoded < 40 * len(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True).startswith(found)


def test_invalid_bytes_are_returned_without_a_following_character() -> None:
    """Only the last three may begin one."""
    tokenizer = byte_level()
    text = SettledText(tokenizer.decode)
    assert [text.add([token_of(tokenizer, 0x98)]) for _ in range(5)] == ["", "", "", "\ufffd", "\ufffd"]
    assert text.num_unsettled == 3


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


def test_long_stop_strings_are_compared_once() -> None:
    """The tokens are held until the stop string can no longer follow."""
    tokenizer = byte_level()
    decode = plain_decoder(tokenizer)
    ids = tokenizer.encode("ab" * 400, add_special_tokens=False)
    stops = [CountedText("ab" * 500), CountedText("b" * 500), CountedText("c")]
    gate = StopGate(stops, SettledText(lambda part: CountedText(decode(part))))
    CountedText.reset()
    assert not any(gate.add([token]) for token in ids)
    assert CountedText.num_copied < 40 * len(ids)
    assert CountedText.num_measured < 40 * len(ids)
    other = tokenizer.encode("x", add_special_tokens=False)
    assert gate.add(other) == [*ids, *other]
