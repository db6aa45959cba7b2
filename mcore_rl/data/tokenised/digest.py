"""Digest of everything that the tokenised form of files depends on: file contents, tokenizer, keys, versions."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from mcore_rl.data.sources.paths import is_saved_dataset
from mcore_rl.data.tokenised.blocks import BlockTokeniser

FORMAT = 4
"""Version of the cached files. Increase it when the same rows would be read, rendered or written differently."""
# Keys that change the tokenised rows. data.shuffle and data.weights, for example, do not.
_DATA_KEYS = (
    "prompt_key",
    "answer_key",
    "template",
    "plain_template",
    "system_prompt",
    "template_kwargs",
    "long_prompts",
)
_ROLLOUT_KEYS = ("max_prompt_tokens", "max_response_tokens")
_PACKAGES = ("mcore-rl", "transformers", "tokenizers", "jinja2")
_PATH_SETTINGS = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file")

Stamp = tuple[tuple[str, int, int], ...]


def digest(files: Sequence[Path], tokeniser: BlockTokeniser, max_prompts: int | None) -> str:
    """Return 32 hexadecimal digits, which depend on the contents of the files and not on their paths.

    Raises: OSError.
    """
    facts = {
        "format": FORMAT,
        "packages": [metadata.version(package) for package in _PACKAGES],
        "files": [(path.suffix, [_content(part) for part in _parts(path)]) for path in files],
        "tokenizer": _tokenizer_facts(tokeniser),
        "data": {name: getattr(tokeniser.data_config, name) for name in _DATA_KEYS},
        "rollout": {name: getattr(tokeniser.rollout_config, name) for name in _ROLLOUT_KEYS},
        "runs_tools": tokeniser.runs_tools,
        "tools": [dict(tool) for tool in tokeniser.tools],
        "targets": tokeniser.with_targets,
        "max_prompts": max_prompts,
        "samples_train": tokeniser.samples_train,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def stamp(files: Sequence[Path]) -> Stamp:
    """Return path, size and modification time of every file: a value that changes when a file is written.

    Raises: OSError.
    """
    stats = [(part, part.stat()) for path in files for part in _parts(path)]
    return tuple((str(part), found.st_size, found.st_mtime_ns) for part, found in stats)


def _parts(path: Path) -> Iterator[Path]:
    yield from sorted(each for each in path.iterdir() if each.is_file()) if is_saved_dataset(path) else [path]


def _content(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _tokenizer_facts(tokeniser: BlockTokeniser) -> list[str]:
    """Return everything that decides the token ids. The tokenizer's files may have moved, so paths are left out."""
    tokenizer = tokeniser.tokenizer
    template = json.dumps(tokenizer.chat_template)
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if name not in _PATH_SETTINGS}
    return [
        hashlib.blake2b(tokenizer.backend_tokenizer.to_str().encode(), digest_size=16).hexdigest(),
        type(tokenizer).__name__,
        json.dumps(settings, sort_keys=True, default=str),
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        template,
        time.strftime("%Y-%m-%d") if "strftime" in template else "",  # the template may print the date
    ]
