"""Optional packages of the connectors."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.specifiers import SpecifierSet

from mcore_rl.errors import ConfigError


class Library(NamedTuple):
    """Package of a connector. versions: supported versions; equal to the extra of this project with the name `kind`."""

    package: str
    versions: str


LIBRARIES = {
    # 0.1.11 to 0.1.14 need datasets < 4.7 and thus huggingface-hub 1, later versions another mcp than this project's.
    "verifiers": Library("verifiers", ">=0.1.10,<0.1.11"),
    "gymnasium": Library("gymnasium", ">=1.0,<2"),
    "openenv": Library("openenv-core", ">=0.3,<0.4"),
    "inspect": Library("inspect-ai", ">=0.3.285,<0.4"),
    "lm_eval": Library("lm-eval", ">=0.4.13,<0.5"),
}
"""By the connector's kind."""


def check_library(kind: str) -> None:
    """Raise ConfigError if the package of a connector is missing or has an unsupported version."""
    package, versions = LIBRARIES[kind]
    remedy = f"install it with `pip install 'mcore-rl[{kind}]'`"
    try:
        found = version(package)
    except PackageNotFoundError:
        raise ConfigError(f"the package {package} is not installed; {remedy}") from None
    if found not in SpecifierSet(versions, prereleases=True):
        raise ConfigError(f"{package} {found} is installed, and the connector needs {package}{versions}; {remedy}")
