"""Settings, files, recipes and commands of the README and the docs. tests/e2e/test_readme.py runs the commands."""

from __future__ import annotations

import re
import shlex

import pytest

from mcore_rl import cli
from mcore_rl.config import load_config
from mcore_rl.config.reading.overrides import split_words
from tests.code_blocks import OTHER_LANGUAGES, SHELLS, code_blocks, documented_commands, pages
from tests.readme import ROOT, commands, files, readme, settings

PAGE = """\
# Page

    make demo   # indented
    mcore-rl plan a.yaml \\
        'data.val={a#b: c}'

1. In a list:

    ```bash
    # only a comment
    make bench
    ```

~~~text
no command
~~~
"""


@pytest.mark.parametrize("given", settings(readme()), ids=" ".join)
def test_every_setting_is_a_key_and_takes_the_value(given: list[str]) -> None:
    load_config(str(ROOT / "configs" / "gsm8k_cpu.yaml"), ["data.train=train.jsonl", *given])


def test_every_file_is_there() -> None:
    named = files(readme())
    assert {"docs/families.md", "configs/demo_cpu.yaml", "scripts/setup_trl.sh"} <= set(named)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_recipe_of_the_table_is_a_file() -> None:
    recipes = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[\w/]+\.yaml`[^|]*)\|", recipes, flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(named) > 10
    assert [name for name in named if not (ROOT / "configs" / name).is_file()] == []


def test_code_blocks_in_all_forms_give_their_commands() -> None:
    blocks = code_blocks("page.md", PAGE)
    assert [(block.line, block.language) for block in blocks] == [(3, ""), (9, "bash"), (14, "text")]
    assert [command for block in blocks if block.language in SHELLS for command in block.commands()] == [
        "make demo",
        "mcore-rl plan a.yaml 'data.val={a#b: c}'",
        "make bench",
    ]


def test_block_without_commands_names_its_language() -> None:
    blocks = [block for page in pages() for block in code_blocks(page)]
    assert len(blocks) > 100
    unknown = [f"{block.page}:{block.line}" for block in blocks if block.language not in SHELLS | OTHER_LANGUAGES]
    assert unknown == []


def of_this_program(command: str) -> list[str]:
    """Return the arguments of `mcore-rl` in a command; empty for another program."""
    program, _, arguments = re.split(r">|\||&&", command)[0].partition(" ")
    return shlex.split(arguments) if program == "mcore-rl" else []


def guides() -> list[str]:
    """Return the commands of this program that only guides and reference pages have."""
    first_steps = set(commands(readme()))
    return [command for command in documented_commands() if of_this_program(command) and command not in first_steps]


@pytest.mark.parametrize("command", guides())
def test_command_of_a_guide_has_options_and_keys_that_exist(command: str) -> None:
    options = cli._parse(of_this_program(command))
    if options.verb in {*cli.CONFIGURED_VERBS, "debug"}:
        overrides = split_words([options.config, *options.words])[1]
        load_config(str(ROOT / "configs" / "gsm8k_cpu.yaml"), ["data.train=train.jsonl", *overrides])
