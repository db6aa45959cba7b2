from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from mcore_rl.data.tokenizer import load_tokenizer
from tests.unit.data.chat.made import byte_tokenizer


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """Write a tokenizer with one token per byte and GPT-2's end of text."""
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    byte_tokenizer(["<|endoftext|>"]).save(str(path))
    return path


@pytest.fixture
def tokenizer(tokenizer_file: Path) -> Any:
    return load_tokenizer(tokenizer_file)


@pytest.fixture
def bos_tokenizer_file(tmp_path: Path) -> Path:
    """Write a tokenizer that adds <s> before and </s> after every text, like older tokenizers."""
    tokenizer = byte_tokenizer(["<|endoftext|>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    path = tmp_path / "bos_tokenizer.json"
    tokenizer.save(str(path))
    return path
