"""Checks of trackers and of the metrics endpoint before a run starts."""

from __future__ import annotations

from dataclasses import dataclass
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
    state = tracker_state(TRACKERS[name], check_login=name in observe.online_trackers)
    remedy = f"or leave {name} out of observe.trackers"
    if state.version is None:
        return f"observe.trackers: {name} is not installed; run `{state.install}`, {remedy}"
    if state.is_too_old:
        return f"observe.trackers: {name} {state.version} is too old; run `{state.install}`, {remedy}"
    if state.login is not None:
        return f"observe.trackers: {name} is not logged in; {state.login}, set observe.trackers_offline=true, {remedy}"
    return None


@dataclass(frozen=True)
class TrackerState:
    """Installation and login of a tracker.

    version: None if it is not installed.
    install: command that installs a supported version.
    login: what to set before it can send to its server; None if it can, or if that was not checked.
    """

    version: str | None
    is_too_old: bool
    install: str
    login: str | None


def tracker_state(kind: TrackerKind, *, check_login: bool) -> TrackerState:
    """Look up the version of a tracker and, if it is supported, check its login."""
    version = installed_version(kind)
    is_too_old = version is not None and Version(version) < Version(kind.minimum)
    login = kind.login_problem() if check_login and version is not None and not is_too_old else None
    return TrackerState(version, is_too_old, f'pip install "{kind.distributions[0]}>={kind.minimum}"', login)


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
