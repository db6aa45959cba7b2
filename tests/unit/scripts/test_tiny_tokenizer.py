"""The tokenizer in configs/models/gsm8k_tiny equals the script's output, fits the model next to it, and round-trips
text."""

from __future__ import annotations

import json

import tiny_tokenizer
from tokenizers import pre_tokenizers

from mcore_rl.data.tokenizer import eos_token_ids, load_tokenizer


def test_the_script_writes_what_is_in_the_repository(tmp_path):
    tiny_tokenizer.write(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        # Compare parsed values: other versions of the library may write other white space.
        written, kept = (json.loads((path / name).read_text()) for path in (tmp_path, tiny_tokenizer.MODEL))
        assert written == kept, f"run: python scripts/tiny_tokenizer.py ({name})"


def test_it_fits_the_model_beside_it():
    config = json.loads((tiny_tokenizer.MODEL / "config.json").read_text())
    tokenizer = load_tokenizer(tiny_tokenizer.MODEL)
    assert len(tokenizer) == config["vocab_size"]
    assert eos_token_ids(tokenizer, tiny_tokenizer.MODEL) == (config["eos_token_id"],) == (config["pad_token_id"],)
    assert config["vocab_size"] % 128 == 0  # tensor parallel ranks share it evenly, without padding


def test_every_byte_has_a_token_and_every_character_comes_back():
    tokenizer = load_tokenizer(tiny_tokenizer.MODEL)
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= tokenizer.get_vocab().keys()
    plain = "".join(map(chr, range(0x3000))) + "Zoë paid  $1,234.50 for 17/34 of the 🥧.\r\n\t#### 34 "
    assert tokenizer.decode(tokenizer(plain)["input_ids"]) == plain


def test_numbers_are_digits_and_frequent_words_are_whole():
    tokenizer = load_tokenizer(tiny_tokenizer.MODEL)
    text = " How many apples are left?\n#### 1234"
    assert tokenizer.tokenize(text) == "ĠHow Ġmany Ġapples Ġare Ġleft ? Ċ #### Ġ 1 2 3 4".split()
