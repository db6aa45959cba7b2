"""Tokenizer with a token for every byte, for formats of replies."""

from __future__ import annotations

from typing import Any

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
EOS, THINK, CLOSE = 1, 3, 4
MERGES = ('{"', '":', '",', "true", "12", "é", "ab", "}]")


def byte_tokenizer(template: str = TEMPLATE) -> Any:
    """Return a byte-level tokenizer of about 290 tokens; <eos> is token 1, <tool> a special token, and the tags of
    reasoning are tokens that are not special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<tool>", "<think>", "</think>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = list[tuple[str, str]]()
    for text in MERGES:
        letters = "".join(piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text))
        for end in range(2, len(letters) + 1):
            if letters[:end] not in names:
                names.append(letters[:end])
                pairs.append((letters[: end - 1], letters[end - 1]))
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[:3]])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in names[3:5]])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = template
    return made
