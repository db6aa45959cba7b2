"""Errors that name a key name a page that exists and describes the key."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from mcore_rl import cli
from mcore_rl.config.pages import PAGES, page_of, with_page
from mcore_rl.config.reading.unknown_keys import known_keys
from mcore_rl.config.schema import Config
from mcore_rl.errors import ConfigError
from tests.readme import ROOT


def test_every_section_has_a_page_that_exists() -> None:
    assert {each.name for each in fields(Config)} <= set(PAGES)
    assert [page for page in map(page_of, known_keys()) if not (ROOT / page).is_file()] == []


def test_every_entry_is_a_section_or_key() -> None:
    keys = known_keys()
    assert [name for name in PAGES if not any(f"{key}.".startswith(f"{name}.") for key in keys)] == []


@pytest.mark.parametrize("name", PAGES)
def test_page_of_a_section_names_its_keys(name: str) -> None:
    text = (ROOT / PAGES[name]).read_text(encoding="utf-8")
    assert re.search(rf"(?<![\w.]){re.escape(name)}\b", text)


@pytest.mark.parametrize(
    ("key", "page"),
    [
        ("data.train", "data"),
        ("rollout.temperature", "engines"),
        ("rollout.tools", "tools"),
        ("rollout.tool_parser", "tools"),  # not rollout.tools, whose name begins the same
        ("actor.lora.rank", "lora"),
        ("actor.optimizer.lr", "configuration"),
        ("critic.parallel.tp", "configuration"),
    ],
)
def test_page_of_a_key_is_that_of_its_innermost_section(key: str, page: str) -> None:
    assert page_of(key) == f"docs/{page}.md"


@pytest.mark.parametrize(
    ("message", "end"),
    [
        ("data.train=x: there is no file x", " (see docs/data.md)"),
        ("run.yaml, line 3: unknown key data.trian; did you mean data.train?", " (see docs/data.md)"),
        ("reward.weighted[0].name=a must be b", " (see docs/rewards.md)"),
        ("sandbox.url names rollout.tools", " (see docs/sandbox.md)"),  # the first key
        ("reward.function=f.py:g failed:\nKeyError: 1", "\n(see docs/rewards.md)"),
        ("cannot read the configuration data.yaml", ""),  # a file with the name of a section
        ("/data/run.dir/file is damaged", ""),
        ("--out=x exists; remove it", ""),
        ("cluster.isolation=namespace ... (docs/security.md)", ""),
        ("data.train=/docs/a.md is empty", " (see docs/data.md)"),  # a path of the user
    ],
)
def test_message_ends_with_the_page_of_its_first_key(message: str, end: str) -> None:
    assert with_page(message) == message + end


def test_command_line_prints_the_page_on_the_line_of_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object) -> int:
        raise ConfigError("rollout.swap=never must be one of keep, recompute, finish")

    monkeypatch.setattr(cli, "_keys", fail)
    assert cli.main(["keys"]) == 2
    message = "error: rollout.swap=never must be one of keep, recompute, finish (see docs/async.md)\n"
    assert capsys.readouterr().err == message
