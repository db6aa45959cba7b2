"""Assembly of report.html from summary, blocks and assets."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import asdict
from importlib.resources import files

from mcore_rl.observe.report.pages import Blocks
from mcore_rl.observe.report.series import CHARTS

SUMMARY = "summary"
"""Block that the page reads first."""
SCRIPTS = (
    "uPlot.iife.min.js",
    "dom.js",
    "curves.js",
    "steps.js",
    "timeline.js",
    "browser.js",
    "response.js",
    "main.js",
)
STYLES = ("uPlot.min.css", "report.css")


def render(blocks: Blocks, summary: dict[str, object]) -> str:
    """Return the page. Texts of models are only in blocks, which consist of base64 and cannot contain HTML.

    The page loads nothing: its policy forbids all requests, and all scripts but its own.
    """
    blocks.add(SUMMARY, summary | {"charts": [asdict(chart) for chart in CHARTS]})
    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    parts = {
        "POLICY": policy,
        "STYLE": "\n".join(_asset(name) for name in STYLES),
        "BLOCKS": "\n".join(
            f'<script type="text/plain" data-block="{name}">{text}</script>' for name, text in blocks.encoded.items()
        ),
        "SCRIPT": script,
    }
    page = _asset("report.html")
    for name, text in parts.items():
        page = page.replace(f"{{{{{name}}}}}", text)
    return page


def _asset(name: str) -> str:
    return files("mcore_rl.observe.report").joinpath("assets", name).read_text(encoding="utf-8")
