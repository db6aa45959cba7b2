"""Optional packages of the connectors."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from packaging.specifiers import SpecifierSet

from mcore_rl.config.functions import describe
from mcore_rl.errors import ConfigError

SUITES = ("verifiers", "inspect", "lm_eval")
"""Kinds that rollout.harness plays."""
ENVIRONMENTS = ("gymnasium", "openenv")
"""Kinds that rollout.environment plays."""
KINDS = (*SUITES, *ENVIRONMENTS)


class Library(NamedTuple):
    """Package of a connector. versions: supported versions. modules: the package's modules that the connector imports.

    The extra of this project with the name `kind` has the package, its `extras` and its versions.
    """

    package: str
    versions: str
    modules: tuple[str, ...] = ()
    extras: str = ""


LIBRARIES = {
    # 0.1.11 to 0.1.14 need datasets < 4.7 and thus huggingface-hub 1, later versions another mcp than this project's.
    "verifiers": Library("verifiers", ">=0.1.10,<0.1.11", ("verifiers",)),
    "gymnasium": Library("gymnasium", ">=1.0,<2", ("gymnasium", "gymnasium.spaces")),
    "openenv": Library("openenv-core", ">=0.3,<0.4", ("openenv.core.generic_client",)),
    # The connector uses names that are not public, which other versions may not have.
    "inspect": Library(
        "inspect-ai",
        ">=0.3.285,<0.3.286",
        ("inspect_ai", "inspect_ai._eval.task.generate", "inspect_ai.solver._task_state", "inspect_ai.util._store"),
    ),
    # The extra has the client of `lm_eval run --model local-chat-completions`.
    "lm_eval": Library("lm-eval", ">=0.4.13,<0.5", ("lm_eval.tasks", "lm_eval.api.instance"), "[api]"),
}
"""Library of each kind of connector."""


def check_library(kind: str) -> None:
    """Raise ConfigError if the package of a connector is missing or has an unsupported version."""
    package, versions, *_ = LIBRARIES[kind]
    remedy = _remedy(kind)
    try:
        found = version(package)
    except PackageNotFoundError:
        raise ConfigError(f"the package {package} is not installed; {remedy}") from None
    if found not in SpecifierSet(versions, prereleases=True):
        raise ConfigError(f"{package} {found} is installed, and the connector needs {package}{versions}; {remedy}")


def import_library(kind: str) -> None:
    """Import the modules of a connector's package, which may take seconds.

    Raises: ConfigError if the package is missing, has an unsupported version, or does not import.
    """
    check_library(kind)
    package, _, modules, _ = LIBRARIES[kind]
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # errors of the package and of its dependencies
        raise ConfigError(
            f"the package {package} {version(package)} does not import: {describe(error)}; {_remedy(kind)}"
        ) from error


def _remedy(kind: str) -> str:
    return f"install it with `pip install 'mcore-rl[{kind}]'`"
