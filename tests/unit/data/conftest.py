import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors


def byte_tokenizer() -> Tokenizer:
    """Write a tokenizer with one token per byte (a byte-level BPE without merges) and GPT-2's end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


@pytest.fixture
def tokenizer_file(tmp_path):
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    byte_tokenizer().save(str(path))
    return path


@pytest.fixture
def bos_tokenizer_file(tmp_path):
    """Write a tokenizer that adds <s> before and </s> after every text, like older tokenizers."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
    )
    path = tmp_path / "bos_tokenizer.json"
    tokenizer.save(str(path))
    return path
