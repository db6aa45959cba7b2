"""Pages of the documentation site. `make docs` builds it; these tests need no Sphinx."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mcore_rl.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from mcore_rl.config import load_config
from tests.readme import ROOT

DOCS = ROOT / "docs"


def navigation(page: str) -> list[str]:
    """Return the pages of a page's toctree, and of the pages in it, relative to docs/."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    entries = [line for tree in re.findall(r"^```\{toctree\}\n(?:.*\n)*?\n((?:.+\n)+?)```", text, re.MULTILINE)
               for line in tree.split()]  # fmt: skip
    # docs/keys/ is generated when the site is built.
    folder = page.rpartition("/")[0]
    names = [f"{folder}/{entry}".lstrip("/") for entry in entries if not entry.startswith("keys/")]
    return [each for name in names for each in (name, *navigation(name))]


def test_every_page_is_in_the_navigation_once() -> None:
    pages = navigation("index")
    files = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}
    assert sorted(pages) == sorted(name for name in files - {"index"} if not name.startswith("keys/"))


def test_papers_page_has_every_source_of_the_algorithms() -> None:
    page = (DOCS / "papers.md").read_text(encoding="utf-8")
    files = (ROOT / "mcore_rl" / "algorithms").rglob("*.py")
    sources = {number for file in files for number in re.findall(r"\b\d{4}\.\d{5}\b", file.read_text())}
    assert len(sources) > 20
    assert sorted(number for number in sources if f"[{number}]" not in page and f"[arXiv {number}]" not in page) == []


def test_papers_page_has_every_algorithm() -> None:
    page = (DOCS / "papers.md").read_text(encoding="utf-8")
    assert [name for name in ADVANTAGES if not re.search(rf"algorithm\.advantage={name}\b", page)] == []
    losses = [name for name in POLICY_LOSSES if not re.search(rf"algorithm\.policy_loss\.name={name}\b", page)]
    assert losses == ["sft"]  # no reinforcement learning


def papers() -> dict[str, list[str]]:
    """Return the keys of every row of papers.md, by paper."""
    cells = [row.split(" | ") for row in (DOCS / "papers.md").read_text(encoding="utf-8").splitlines()]
    rows = {row[0].removeprefix("| "): row[1] for row in cells if len(row) > 2}
    keys = {
        paper: [key for text in re.findall("`(.*?)`", cell) for key in text.split()] for paper, cell in rows.items()
    }
    return {paper: found for paper, found in keys.items() if all("=" in key for key in found)}


@pytest.mark.parametrize("paper", papers())
def test_keys_of_paper_are_a_complete_set(paper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("run: {dir: x}\nmodel: {hf_path: y}\n")
    load_config("config.yaml", papers()[paper], needs_data=False)


def test_make_docs_checks_for_the_packages_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {Requirement(text).name for text in project["optional-dependencies"]["docs"]}
    makefile = (ROOT / "Makefile").read_text()
    assert {"myst-parser", "pydata-sphinx-theme", "sphinx", "sphinxcontrib-mermaid"} == names
    assert "import myst_parser, pydata_sphinx_theme, sphinxcontrib.mermaid" in makefile
