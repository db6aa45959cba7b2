"""File systems of URLs. fsspec selects the package of a protocol, such as s3fs; its own variables and files hold the
credentials.

This module imports no configuration: engines of other environments use it, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mcore_rl.errors import ConfigError, McoreRLError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PARALLEL_FILES = 8
"""Files that are copied at the same time."""


@contextmanager
def named_errors(key: str, url: str, kind: type[McoreRLError] = ConfigError, note: str = "") -> Iterator[None]:
    """Convert errors of the block, except this project's, to `kind` with `key` and the remedy."""
    try:
        yield
    except McoreRLError:
        raise
    # The packages of protocols raise errors of their own, for example botocore's if there are no credentials.
    except Exception as error:
        raise kind(
            f"{key}={url}: {shown(error)}{note}; check the address, the network and the credentials, or set {key} to a "
            "local path"
        ) from error


def shown(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    reason = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def file_system(key: str, url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL, and the path there.

    Raises: ConfigError if a package is missing.
    """
    try:
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations
    except ImportError as error:
        raise ConfigError(f"{key}={url}: {error}; run `{sys.executable} -m pip install fsspec`") from None

    protocol = url.partition("://")[0]
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        # The message names the package: "Install s3fs to access S3".
        raise ConfigError(
            f"{key}={url}: {error}; install it with pip in {sys.prefix}, or set {key} to a local path"
        ) from None
    except ValueError:
        if protocol in known_implementations:
            raise
        raise ConfigError(
            f"{key}={url}: {protocol}:// is not known to fsspec; use one such as s3://, gs:// or abfs://, or set {key} "
            "to a local path"
        ) from None
    return system, path.rstrip("/")


def is_local(system: AbstractFileSystem) -> bool:
    """Return whether the files are in directories of this machine, which may be mounted from a server."""
    return bool(getattr(system, "local_file", False))
