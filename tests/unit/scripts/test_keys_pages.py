"""Reference of the configuration keys for the documentation site."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from keys_pages import Reference, mentions, reference, write_pages

from mcore_rl.config.catalogue import KeyEntry
from mcore_rl.config.reading.unknown_keys import known_keys

ENTRY = KeyEntry("run.dir", "str", None, True, None, None, (), "Directory.")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference().pages()


def test_pages_have_every_key_once_and_every_section_in_index(pages: dict[str, str]) -> None:
    keys = Counter(key for text in pages.values() for key in re.findall(r"^```\{confval\} (\S+)$", text, re.MULTILINE))
    assert keys == Counter(known_keys())
    sections = {key.partition(".")[0] for key in known_keys()}
    assert {f"{section}.md" for section in sections} == set(pages) - {"index.md"}
    rows = re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| \d+ \| (.+) \|$", pages["index.md"], re.MULTILINE)
    assert {section for section, _ in rows} == sections


def test_page_own_keys_precede_subsections(pages: dict[str, str]) -> None:
    """In the schema, algorithm.filter comes after the subsections."""
    own, _, rest = pages["algorithm.md"].partition("\n## ")
    assert "{confval} algorithm.filter\n" in own
    assert "\n## algorithm.kl\n" in rest
    assert not re.search(r"^```\{confval\} algorithm\.\w+$", rest, re.MULTILINE)


def test_key_text_is_escaped_and_keys_become_links() -> None:
    other = replace(ENTRY, key="run.seed", required=False, default=1)
    text = "Writes step_<n>.jsonl [B] as `a_<b>`; see run.seed and `run.seed`, not run.seeds or `run.seed=1`."
    page = Reference([replace(ENTRY, text=text), other], {"run": ""}, {}).pages()["run.md"]
    assert (
        r"Writes step\_\<n\>.jsonl \[B\] as `a_<b>`; see {confval}`run.seed` and {confval}`run.seed`, not run.seeds or "
        "`run.seed=1`."
    ) in page


@pytest.mark.parametrize("default", ['say "no"', r"\boxed{}", "a: b", "a\n\nb", ["x"], {}, None, 1e-6])
def test_key_default_is_a_valid_option_of_the_directive(default: object) -> None:
    entry = replace(ENTRY, default=default, required=False)
    page = Reference([entry], {"run": ""}, {}).pages()["run.md"]
    (line,) = re.findall(r"^:default: (.*)$", page, re.MULTILINE)
    assert yaml.safe_load(line) == f"`{entry.written_default}`"
    assert yaml.safe_load(str(entry.written_default)) == default


def test_key_text_names_of_pages_become_links() -> None:
    page = Reference([replace(ENTRY, text="See docs/run-directory.md.")], {"run": ""}, {}).pages()["run.md"]
    assert "See [docs/run-directory.md](../run-directory.md)." in page


def test_required_key_has_no_default() -> None:
    page = Reference([ENTRY], {"run": ""}, {}).pages()["run.md"]
    assert ":default:" not in page
    assert "Required." in page


def test_mentions_names_pages_with_whole_key(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# First\n\n`run.dir=DIR` and `run.dir`\n")
    (tmp_path / "b.md").write_text("# Second\n\n`run.directory`\n")
    assert mentions(["run.dir"], tmp_path) == {"run.dir": [("First", "a.md")]}


def test_write_pages_removes_stale_and_keeps_unchanged_files(tmp_path: Path) -> None:
    written = write_pages(tmp_path / "keys")
    times = {path: path.stat().st_mtime_ns for path in written}
    stale = tmp_path / "keys" / "removed_section.md"
    stale.write_text("# removed_section\n")
    assert write_pages(tmp_path / "keys") == written
    assert not stale.exists()
    assert {path: path.stat().st_mtime_ns for path in written} == times
