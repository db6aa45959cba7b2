"""Tables of supported and rejected families, generated from each family's Description."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from model_converters.errors import ConversionError
from model_converters.families import FAMILIES
from model_converters.families.parts.description import Description
from model_converters.families.refusals import REFUSED

BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


def as_lines() -> Iterator[str]:
    """Yield the catalogue as text: one line per family, followed by the features it supports and rejects."""
    width = max(map(len, [*FAMILIES, *REFUSED]))
    for model_type, family in sorted(FAMILIES.items()):
        about = family.description
        yield f"{model_type:{width}}  {about.models}"
        yield f"{'':{width}}    supports {about.covers}"
        yield f"{'':{width}}    rejects  {', '.join(_refused(about))}"
        yield f"{'':{width}}    vLLM on CPU: {about.vllm_cpu}"
    for model_type, refusal in sorted(REFUSED.items()):
        yield f"{model_type:{width}}  {refusal.models}: not supported"
        yield from (f"{'':{width}}    missing  {what}" for what in refusal.missing)


def as_markdown() -> str:
    """Return two Markdown tables: supported families, and known families that are rejected."""
    supported = [
        (f"`{name}`", about.models, about.covers, ", ".join(f"`{field}`" for field in _refused(about)), about.vllm_cpu)
        for name, about in ((name, family.description) for name, family in sorted(FAMILIES.items()))
    ]
    refused = [(f"`{name}`", refusal.models, "; ".join(refusal.missing)) for name, refusal in sorted(REFUSED.items())]
    return "\n".join(
        [
            *_table(
                ("model_type", "models", "supported features", "rejected fields, for example", "vLLM on CPU"), supported
            ),
            "",
            *_table(("known, not supported", "models", "missing features"), refused),
        ]
    )


def write_between_markers(path: Path) -> None:
    """Replace the text between the two marker lines of a page by the Markdown tables.

    Raises: ConversionError if the page cannot be read or lacks the markers.
    """
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from error
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConversionError(f"{path} needs the lines {BEGIN} and {END}, in this order")
    path.write_text(f"{before}{BEGIN}\n{as_markdown()}\n{END}{after}", encoding="utf-8")


def _refused(about: Description) -> Iterator[str]:
    # Values in the spelling of config.json: true and null instead of True and None.
    return (f"{field}={json.dumps(value)}" for field, value in about.refused.items())


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "|---" * len(headings) + "|"
    yield from (f"| {' | '.join(cells)} |" for cells in rows)
