"""Expansion of `~` and environment variables in paths; paths that are not UTF-8 are rejected."""

from __future__ import annotations

import os
import re

from mcore_rl.errors import ConfigError

_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")


def expand_path(key: str, path: str) -> str:
    """Expand `~`, `~user`, `$NAME` and `${NAME}` in a path; file:///path becomes /path. A path with `$` that exists is
    not changed.

    Raises: ConfigError naming `key`, for an unknown user, an unset variable, a path that is not UTF-8, or a NUL
    character.
    """
    check_utf8(key, path)
    if "\0" in path:
        raise ConfigError(f"{key}: {path!r} has a NUL character, which no path may have; remove it")
    text = os.path.expanduser(path.removeprefix("file://"))
    # expanduser leaves the name of an unknown user unchanged.
    if text.startswith("~"):
        user = text.partition("/")[0]
        raise ConfigError(f"{key}={path}: there is no home directory of {user}; write ./{path} for a name with ~")
    # A file may have $ in its name. lexists also finds a dangling link.
    if _VARIABLE.search(text) and not os.path.lexists(text):
        text = _VARIABLE.sub(lambda match: _value(key, path, match[1] or match[2]), text)
    # The value of a variable may have other bytes.
    check_utf8(key, text)
    return text


def expand_spec(key: str, spec: str) -> str:
    """Expand the file's path in module_or_file.py:function; other texts are not changed.

    Raises: ConfigError.
    """
    source, colon, name = spec.rpartition(":")
    return f"{expand_path(key, source)}:{name}" if colon and source.endswith(".py") else spec


def check_utf8(key: str, text: str) -> None:
    """Raise ConfigError naming `key` if a text has bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # Python decodes other bytes of an argument to lone surrogates (PEP 383), which UTF-8 cannot encode.
        shown = re.sub("[\udc80-\udcff]", lambda byte: f"\\x{ord(byte[0]) - 0xDC00:02x}", text)
        shown = shown.encode(errors="backslashreplace").decode()
        raise ConfigError(f"{key}: {shown} is not UTF-8; write it in UTF-8 (rename a file or directory)") from None


def _value(key: str, path: str, name: str) -> str:
    if name not in os.environ:
        raise ConfigError(f"{key}={path}: the environment variable {name} is not set; set it, or write the whole path")
    return os.environ[name]
