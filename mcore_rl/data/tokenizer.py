"""Loading of tokenizers from an HF directory or a single tokenizer.json, always with an end-of-sequence token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.config.reading.json_files import read_json_object
from mcore_rl.data.tokenizer_import import auto_tokenizer
from mcore_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAIN = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
"""Arguments of `decode` that keep every character of every token."""
_DIRECTORY_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json")
_EOS_NAMES = (
    "<|endoftext|>",
    "</s>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "<eos>",
    "[EOS]",
)
"""Names of the end-of-sequence token in released tokenizers, for files that do not define it."""
POLICY_KEY = "model.tokenizer_path"


def load_tokenizer(path: str | Path, key: str = POLICY_KEY) -> PreTrainedTokenizerBase:
    """Load the fast tokenizer at `path`, an HF directory or a single tokenizer.json file.

    eos_token is always set: from the tokenizer's configuration, else from generation_config.json or config.json in the
    same directory, else from a known name such as GPT-2's `<|endoftext|>`. pad_token defaults to it. Nothing is
    downloaded, and no code in the directory is executed.

    Raises: ConfigError naming `key`.
    """
    path = Path(path)
    directory, bare_file = _locate(path, key)
    tokenizer = _load(directory, bare_file, key)
    if tokenizer.eos_token_id is None:
        tokenizer.eos_token = _find_eos(tokenizer, directory, path, key)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def changes_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether decoding removes spaces before punctuation, so that a token may change the text before it."""
    # transformers 5.19 leaves the texts of BPE as they are, whatever their configuration says.
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return bool(tokenizer.clean_up_tokenization_spaces) and not is_bpe


@functools.lru_cache(maxsize=4)
def byte_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the tokens that stand for one byte each, such as <0x0A> in tokenizers of SentencePiece."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = tokenizer.get_vocab()
    return frozenset(vocabulary[name] for name in names if name in vocabulary)


def eos_token_ids(tokenizer: PreTrainedTokenizerBase, model_dir: str | Path, key: str = POLICY_KEY) -> tuple[int, ...]:
    """Return all token ids that end a response: the tokenizer's, then the ids in generation_config.json, if it exists.

    Raises: ConfigError for a generation_config.json that cannot be read.
    """
    ids = [int(tokenizer.eos_token_id)]
    ids += _eos_ids(Path(model_dir) / "generation_config.json", key)
    return tuple(dict.fromkeys(ids))


def plain_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes token ids with special tokens and without clean-up of spaces."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # skip the Python layers, which take longer than decoding a few tokens
        return functools.partial(backend.decode, skip_special_tokens=False)
    return functools.partial(tokenizer.decode, **PLAIN)


def _locate(path: Path, key: str) -> tuple[Path | None, Path | None]:
    """Return (directory with configuration, single tokenizer.json); either may be None."""
    if not path.exists():
        raise ConfigError(f"{key}: there is no {path}; set it to an HF directory or a tokenizer.json file")
    if path.is_file():
        # A tokenizer.json in an HF directory uses the special tokens and the chat template of the directory.
        if path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").is_file():
            return path.parent, None
        return None, path
    if not any((path / name).is_file() for name in _DIRECTORY_FILES):
        names = ", ".join(_DIRECTORY_FILES)
        raise ConfigError(f"{key}: {path} contains no tokenizer (none of {names}); set it to a tokenizer directory")
    bare = path / "tokenizer.json"
    return path, None if (path / "tokenizer_config.json").is_file() or not bare.is_file() else bare


def _load(directory: Path | None, bare_file: Path | None, key: str) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    if bare_file is not None:
        read_json_object(bare_file, key)
    try:
        if bare_file is not None:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(bare_file))
            template = bare_file.parent / "chat_template.jinja"
            if template.is_file():
                tokenizer.chat_template = template.read_text(encoding="utf-8")
            return tokenizer
        # A directory may contain code, which must not run; nothing may be downloaded.
        tokenizer_class = auto_tokenizer()
        return tokenizer_class.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises a plain Exception for unreadable files
        raise ConfigError(f"{key}: {bare_file or directory} is not a readable tokenizer: {error}") from error


def _find_eos(tokenizer: PreTrainedTokenizerBase, directory: Path | None, path: Path, key: str) -> str:
    if directory is not None:
        for name in ("generation_config.json", "config.json"):
            for token_id in _eos_ids(directory / name, key):
                token = tokenizer.convert_ids_to_tokens(token_id)
                if token is not None:
                    return str(token)
    vocabulary = tokenizer.get_vocab()
    for name in _EOS_NAMES:
        if name in vocabulary:
            return name
    raise ConfigError(
        f"{key}: {path} has no end-of-sequence token; set `eos_token` in its "
        "tokenizer_config.json"
        f" (looked for eos_token_id in config files and for {', '.join(_EOS_NAMES)})"
    )


def _eos_ids(path: Path, key: str) -> list[int]:
    """Return the eos_token_id of a configuration file; none if the file does not exist."""
    value = read_json_object(path, key).get("eos_token_id") if path.is_file() else None
    given = value if isinstance(value, list) else [value]
    return [int(str(token_id)) for token_id in given if value is not None]
