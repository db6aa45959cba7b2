"""Texts of models in a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mcore_rl.observe.terminal_text import printable, shortened, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07\x1b[2J", "U+001B]0;titleU+0007U+001B[2J"),
        ("\x9b31m\x7f\x08", "U+009B31mU+007FU+0008"),
        ("a\u202egnirts\u2066\u200f\u200b", "aU+202EgnirtsU+2066U+200FU+200B"),
        ("one\ntwo\r\tend", "one↵two↵ end"),
        ("a\u2028b\u2029c\x85d", "aU+2028bU+2029cU+0085d"),
        ("half \ud83d", "half U+D83D"),
        ("[bold red]x[/] [link=http://x]y[/link] :smile:", "[bold red]x[/] [link=http://x]y[/link] :smile:"),
        ("答え\u30001 é 😀", "答え\u30001 é 😀"),
    ],
)
def test_visible_shows_hidden_characters_by_number(text: str, shown: str) -> None:
    file = io.StringIO()
    Console(file=file, width=200, force_terminal=True, color_system=None).print(visible(text), soft_wrap=True)
    assert file.getvalue() == shown + "\n"


def test_printable_keeps_lines_only() -> None:
    assert printable("one\n\x1b[2Jtwo\r\u202e\n") == "one\nU+001B[2Jtwo↵U+202E\n"


def test_shortened_keeps_start_and_end() -> None:
    text = "a" * 500 + "b" * 500
    cut = shortened(text, 90)
    assert cut == "a" * 30 + " [... 910 characters ...] " + "b" * 60
    assert shortened("short", 90) == "short"
    assert shortened("x" * 90, 90) == "x" * 90
