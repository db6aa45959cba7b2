"""Checks of the trackers in observe.trackers: version, and login at their servers."""

from __future__ import annotations

from mcore_rl.config.observe import LOCAL_TRACKER
from mcore_rl.doctor.checks import Check, Need
from mcore_rl.observe.trackers.check import tracker_state
from mcore_rl.observe.trackers.registry import TRACKERS, TrackerKind

REPAIR = "correct the settings of the tracker, or install it again"


def check_trackers() -> list[Check]:
    """Check all trackers with a server. Each is imported, because only its package can find its login."""
    return [_check(name, kind) for name, kind in TRACKERS.items() if name != LOCAL_TRACKER]


def _check(name: str, kind: TrackerKind) -> Check:
    feature = f"observe.trackers={name}"
    try:
        state = tracker_state(kind, check_login=True)
    except Exception as error:  # a package that does not import must not end the report
        reason = str(error).partition("\n")[0]
        return Check(name, False, f"installed, but fails: {reason}", Need.EXTRA, feature, REPAIR)
    if state.version is None or state.is_too_old:
        found = "-" if state.version is None else f"{state.version}, too old"
        return Check(name, False, found, Need.EXTRA, feature, state.install)
    use = "can send" if state.login is None else f"offline only: {state.login}"
    return Check(name, True, f"{state.version}, {use}", Need.EXTRA, feature)
