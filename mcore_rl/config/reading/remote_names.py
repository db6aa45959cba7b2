"""Names of files that are not on this machine: repositories on the Hugging Face hub, and URLs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import quote, unquote

from mcore_rl.errors import ConfigError

HubKind = Literal["model", "dataset"]
HUB = "hf://"
DATASETS = "datasets/"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_WORD = r"[A-Za-z0-9][\w.-]*"
_ID = re.compile(rf"({_WORD}/{_WORD})(?:@([\w./%-]+))?", re.ASCII)
_PLACE = re.compile(rf"({_WORD}/{_WORD})(?:@([\w.%-]+))?(?:/+(.*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE = re.compile(r".*\.(jsonl?|parquet|csv|txt|ya?ml)", re.IGNORECASE)
"""Names that end like a file are paths: data/train.jsonl has the form of a hub id."""


def is_url(text: str) -> bool:
    """Return True for names such as s3://bucket/file, hf://datasets/owner/name and file:///path."""
    return _URL.match(text) is not None


@dataclass(frozen=True)
class HubName:
    """Repository on the hub, or files in it.

    revision: branch, tag or commit; None: the default branch. path: file, folder or glob in the repository; empty: not
    restricted. as_url: whether the name is written with hf://.
    """

    kind: HubKind
    repo: str
    revision: str | None = None
    path: str = ""
    as_url: bool = False

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit, which never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str) -> HubName:
        """Return the same files of another revision."""
        return replace(self, revision=revision)

    def __str__(self) -> str:
        """Format as in a configuration; `parse_hub_name` reads back an equal name."""
        at = "" if self.revision is None else f"@{quote(self.revision, safe='') if self.as_url else self.revision}"
        if not self.as_url:
            return f"{self.repo}{at}"
        path = f"/{self.path}" if self.path else ""
        return f"{HUB}{DATASETS if self.kind == 'dataset' else ''}{self.repo}{at}{path}"


def parse_hub_name(key: str, text: str, kind: HubKind) -> HubName | None:
    """Parse OWNER/NAME, OWNER/NAME@REVISION, or hf://; None for a path, which exists or has another form.

    Raises: ConfigError for an hf:// URL that names no repository of this kind.
    """
    if not text.startswith(HUB):
        match = _ID.fullmatch(text)
        is_path = match is None or _FILE.fullmatch(text) is not None or os.path.lexists(text)
        return None if match is None or is_path else HubName(kind, match[1], match[2])
    prefix = DATASETS if kind == "dataset" else ""
    match = _PLACE.fullmatch(text.removeprefix(HUB).removeprefix(prefix))
    fits = text.startswith(f"{HUB}{DATASETS}") == bool(prefix)
    if match is None or not fits or (match[3] and kind == "model"):
        form = f"{HUB}{prefix}OWNER/NAME[@REVISION]{'[/FILE_OR_GLOB]' if prefix else ''}"
        raise ConfigError(f"{key}={text} names no {'data set' if prefix else 'model'} on the hub; write {form}")
    # A revision may have slashes (refs/pr/1), which URLs write as %2F.
    return HubName(kind, match[1], match[2] and unquote(match[2]), (match[3] or "").rstrip("/"), as_url=True)
