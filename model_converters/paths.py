"""Paths given on the command line."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")


def expanded_path(text: str) -> Path:
    """Expand `~`, `~user`, `$NAME` and `${NAME}` in a path, for arguments that the shell did not expand.

    Raises: argparse.ArgumentTypeError for an empty path, an unknown user, a variable that is not set, and a path that
    is not UTF-8.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise argparse.ArgumentTypeError(f"{text}: {path.partition('/')[0]} has no home directory")
    if not os.path.lexists(path):
        for match in _VARIABLE.finditer(path):
            if (match[1] or match[2]) not in os.environ:
                raise argparse.ArgumentTypeError(f"{text}: the environment variable {match[1] or match[2]} is not set")
        path = os.path.expandvars(path)
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = path.encode(errors="surrogateescape").decode(errors="backslashreplace")
        raise argparse.ArgumentTypeError(f"{shown} is not UTF-8; rename the file or directory") from None
    return Path(path)
