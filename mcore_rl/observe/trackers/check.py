"""Checks of trackers and of the metrics endpoint before a run starts."""

from __future__ import annotations

from importlib import metadata, util

from packaging.version import Version

from mcore_rl.config.observe import ObserveConfig
from mcore_rl.errors import ConfigError
from mcore_rl.observe.endpoint import check_address
from mcore_rl.observe.trackers.registry import TRACKERS, TrackerKind


def check_observers(observe: ObserveConfig) -> None:
    """Check that all trackers are installed and logged in, and that the endpoint's address is free.

    Raises: ConfigError with all problems and what to set.
    """
    names = observe.trackers
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"observe.trackers names {', '.join(repeated)} twice; remove one of them")
    if observe.prometheus_port:
        check_address(observe.prometheus_host, observe.prometheus_port)
    if problems := [problem for name in names if (problem := _problem(name, observe)) is not None]:
        raise ConfigError("; ".join(problems))


def _problem(name: str, observe: ObserveConfig) -> str | None:
    kind = TRACKERS[name]
    remedy = f"or leave {name} out of observe.trackers"
    install = f'pip install "{kind.distributions[0]}>={kind.minimum}"'
    if (version := installed_version(kind)) is None:
        return f"observe.trackers: {name} is not installed; run `{install}`, {remedy}"
    if Version(version) < Version(kind.minimum):
        return f"observe.trackers: {name} {version} is too old; run `{install}`, {remedy}"
    if name in observe.online_trackers and (login := kind.login_problem()) is not None:
        return f"observe.trackers: {name} is not logged in; {login}, set observe.trackers_offline=true, {remedy}"
    return None


def installed_version(kind: TrackerKind) -> str | None:
    """Return the installed version; None if the package, or its module, is missing."""
    if util.find_spec(kind.module) is None:
        return None
    for distribution in kind.distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None
