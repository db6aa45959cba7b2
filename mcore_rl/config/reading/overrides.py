"""Words of a command line: configuration files and `key=value` overrides."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from mcore_rl.config.reading.values import YamlDumper, YamlLoader, takes_only_text
from mcore_rl.errors import ConfigError

FILE_ENDINGS = (".yaml", ".yml")


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate configuration files from overrides; both keep their order.

    The first word is a file. A later word is a file if it has no `=` and ends with .yaml or .yml.

    Raises: ConfigError for blanks around `=`, which would turn a value such as tools.yaml into a file.
    """
    first, rest = words[:1], words[1:]
    reject_blanks(rest)
    further = [word for word in rest if "=" not in word and word.endswith(FILE_ENDINGS)]
    return [*first, *further], [word for word in rest if word not in further]


def reject_blanks(words: Sequence[str]) -> None:
    """Reject blanks around `=`: the shell passes `trainer.steps = 3` as three arguments."""
    for place, word in enumerate(words):
        key, _, value = word.partition("=")
        before, after = words[max(0, place - 1) : place], list(words[place + 1 : place + 3])
        # The cases: 'key =value' in one argument; 'key' '=' 'value' or 'key' '=value'; 'key=' 'value'.
        if key != key.strip() and key.strip() and "=" in word:
            joined = f"{key.strip()}={value.strip()}"
        elif "=" not in word and after and after[0].startswith("="):
            joined = "".join([word, *after[: 2 if after[0] == "=" else 1]])
        elif "=" not in word and before and before[0].endswith("="):
            joined = before[0] + word
        else:
            continue
        raise ConfigError(f"write {joined} without blanks around =")


def parse_override(item: str) -> dict[str, object]:
    """Return the tree of one override: {"trainer": {"steps": 3}} for trainer.steps=3.

    Raises: ConfigError if it does not have the form key=value.
    """
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"override {item!r} must have the form key=value; the name of a further configuration file ends with .yaml"
        )
    try:
        value: object = yaml.load(text, Loader=YamlLoader) if text else None
    except (yaml.YAMLError, RecursionError, ValueError):
        value = text
    if isinstance(value, bool | int | float) and takes_only_text(key):
        value = text  # keep `no`, `1.10` and `007` as written
    if isinstance(value, dict | list) and not text.lstrip().startswith(("{", "[")):
        value = text  # 'Score: (\d+)' is a string: on a command line, YAML's block style is not intended
    first, *parts = key.split(".")
    for part in reversed(parts):
        value = {part: value}
    return {first: value}


def with_override(overrides: Sequence[str], key: str, value: object) -> list[str]:
    """Return the overrides with the one of `key` replaced, or added at the end. Texts are quoted for YAML if needed."""
    dumped = yaml.dump(value, Dumper=YamlDumper, default_flow_style=True, width=10**6, allow_unicode=True)
    # The dumper ends a plain scalar with the end of its document.
    quoted = dumped.removesuffix("\n").removesuffix("\n...")
    return [*(each for each in overrides if not each.startswith(f"{key}=")), f"{key}={quoted}"]
