"""Stop strings, compared with decoding the whole response after every token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mcore_rl.data.tokenizer import PLAIN, plain_decoder
from mcore_rl.data.transcripts import response_text
from mcore_rl.engines.stop_strings import INCOMPLETE, StopScanner

TEXT = "So x = 3.</answer> End of it, é€😀! Human: 12\n\nAssistant: </s> ####  7 Observation: é "
SPECIAL = ["<eos>", "<|call|>"]
PIECES = 15
"""Number of responses that consist of the text in random pieces."""
STOPS = (
    ["</answer>"],
    ["\n\n", "Human:"],
    ["é"],
    ["😀!", "€"],
    ["a"],
    ["swer", "</answer>", "answer>"],
    ["<|call|>"],
    ["####", "Observation: é "],
    ["x" * 256],
)


def byte_level() -> Tokenizer:
    """Train a byte-level tokenizer whose merges cut words and multi-byte characters in many places."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """Create a tokenizer like Llama 2's: the first space of a text is dropped, unknown characters become bytes."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz.:#/<>=!,0123456789"]
    pieces += ["▁Human", ":</", "answer", "swer>", ">▁", "##", "▁##", "\n"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"byte level": byte_level, "metaspace": metaspace}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    made = TOKENIZERS[request.param]()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", additional_special_tokens=["<|call|>"])


def responses(tokenizer: Any) -> list[list[int]]:
    """Return the text as tokenized, in random pieces, and random tokens, including invalid bytes."""
    rng, found = random.Random(1), [tokenizer(TEXT, add_special_tokens=False)["input_ids"]]
    for _ in range(PIECES):
        cuts = sorted(rng.sample(range(len(TEXT)), 20))
        parts = [TEXT[a:b] for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True)]
        pieces = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
        pieces.insert(rng.randrange(len(pieces)), [tokenizer.convert_tokens_to_ids("<|call|>")])
        found.append([i for piece in pieces for i in piece])
    found += [[rng.randrange(len(tokenizer)) for _ in range(80)] for _ in range(25)]
    return found


def completing_token(tokenizer: Any, ids: Sequence[int], stops: Sequence[str]) -> int | None:
    """Find by brute force the first prefix whose text contains a stop string."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], **PLAIN).rstrip(INCOMPLETE)
        if any(stop in text for stop in stops):
            return count
    return None


@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_scanner_completing_token_equals_brute_force(tokenizer: Any, stops: list[str]) -> None:
    decode, hits = plain_decoder(tokenizer), 0
    for ids in responses(tokenizer):
        expected = completing_token(tokenizer, ids, stops)
        scanner = StopScanner(stops, decode)
        found = next((count for count, token in enumerate(ids, start=1) if scanner.add(token)), None)
        assert found == expected, tokenizer.convert_ids_to_tokens(ids)
        hits += found is not None
        if expected is None or expected == 1:
            continue
        for resumed in {1, expected // 2, expected - 1}:
            scanner = StopScanner(stops, decode, ids[:resumed])
            later = next((count for count, token in enumerate(ids[resumed:], resumed + 1) if scanner.add(token)), None)
            assert later == expected
    assert hits or len(stops[0]) == 256


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the stop string that ends first; of several with the same end, the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return text


@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_response_text_ends_before_first_stop_string(tokenizer: Any, stops: list[str]) -> None:
    for number, ids in enumerate(responses(tokenizer)):
        # A special token between the bytes of a character changes the text when it is removed.
        kept = [i for i in ids if number <= PIECES or i not in tokenizer.all_special_ids]
        count = completing_token(tokenizer, kept, stops)
        response = kept[:count]
        expected = before_stop(tokenizer.decode(response, **PLAIN), stops)
        for special in SPECIAL:
            expected = expected.replace(special, "")
        expected = expected.removesuffix("<|c")  # part of a special token
        assert response_text(tokenizer, response, stops) == expected
        assert response_text(tokenizer, response) == tokenizer.decode(response, skip_special_tokens=True)


def test_scanner_long_response_decodes_few_tokens_per_step(tokenizer: Any) -> None:
    """Includes invalid bytes, which never become a character: each step decodes at most 20 tokens."""
    plain, most = plain_decoder(tokenizer), 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal most
        most = max(most, len(ids))
        return plain(ids)

    invalid = next(i for i in range(len(tokenizer)) if tokenizer.decode([i], **PLAIN) == INCOMPLETE)
    for ids in ([invalid] * 2000, tokenizer("so it goes. " * 200, add_special_tokens=False)["input_ids"]):
        scanner = StopScanner(["never in it"], decode)
        for token in ids:
            assert not scanner.add(token)
    assert most <= 20
