"""Sphinx configuration of the documentation site. `make docs` builds it into build/docs; warnings are errors."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from keys_pages import write_pages  # noqa: E402

import mcore_rl  # noqa: E402

project = "mcore-rl"
author = "the mcore-rl authors"
version = release = mcore_rl.__version__
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
nitpicky = True  # a link to an unknown key is a warning

# GitHub renders the same files: its mermaid fences, and its anchors of headings.
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3
highlight_language = "bash"  # an indented block has commands; other blocks name their language

html_theme = "pydata_sphinx_theme"
html_title = f"mcore-rl {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_sidebars = {page: [] for page in ("quickstart", "concepts", "migration", "architecture")}  # no subpages
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "show_toc_level": 1,
    "secondary_sidebar_items": {"**": ["page-toc"], "papers": [], "upstream-faults": []},  # room for their tables
}


def setup(app: Sphinx) -> None:
    """Write the reference of the keys before Sphinx looks for pages."""
    write_pages(Path(app.srcdir) / "keys")
