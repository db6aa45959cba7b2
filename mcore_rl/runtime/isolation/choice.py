"""Decide whether a run gets a private network namespace, because other users are logged in, and restart it there."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from mcore_rl.config.episodes import WITH_GATEWAY
from mcore_rl.config.fields import urls_of
from mcore_rl.config.observe import ObserveConfig
from mcore_rl.config.rules.rollout import episode_of
from mcore_rl.config.schema import Config, RolloutConfig
from mcore_rl.errors import ConfigError
from mcore_rl.runtime.isolation import namespace

FIRST_UID = 1000
"""Lowest user id of people; lower ids belong to system services (on Debian, Red Hat and SUSE)."""
NOBODY = 65534
"""Owner that the kernel reports for users without a mapping in a user namespace; not a person."""
PROC = Path("/proc")
LOGIN_SESSIONS = Path("/run/systemd/users")
"""One file per user with a login session, named by user id."""
REMEDY = (
    "set cluster.isolation=none to accept that they can connect to its ports and, with effort, run code as you "
    "(docs/security.md)"
)


def isolate(config: Config, show: Callable[[str], None]) -> None:
    """Restart this command in a private network namespace if cluster.isolation requires one; then it does not return.

    Call before anything else starts.

    Raises: as `reason_for_own_network`.
    """
    reason = reason_for_own_network(config)
    if reason is None:
        return
    show(f"{reason}: this run gets a network of its own, and its processes cannot reach other machines")
    # `execv` replaces this process and drops buffered output.
    sys.stdout.flush()
    sys.stderr.flush()
    python = sys.executable
    os.execv(python, [python, "-m", namespace.__name__, python, *sys.orig_argv])


def reason_for_own_network(config: Config) -> str | None:
    """Return why the run gets a private network namespace; None if it gets none.

    A process that was restarted there needs no other one. A run that joins a Ray cluster gets none: check_remote_host
    checks its hosts.

    Raises: ConfigError if other users are logged in and the run cannot be isolated from them.
    """
    wanted = config.cluster.isolation
    if wanted == "namespace" and config.cluster.address is not None:
        raise ConfigError(
            "cluster.isolation=namespace applies to runs that start Ray on this host; leave cluster.address out, or "
            "set cluster.isolation=auto"
        )
    if wanted == "none" or config.cluster.address is not None or namespace.is_inside():
        return None
    others = other_users() if wanted == "auto" else []
    if wanted == "auto" and not others:
        return None
    reason = f"cluster.isolation={wanted}" + (f": {_names(others)} logged in on this host" if others else "")
    servers = {"judge.url": config.judge.url, "sandbox.url": config.sandbox.url, **_observers(config.observe)}
    servers |= {entry.key("url"): entry.url for entry in config.teacher.entries}
    servers |= urls_of(config) | _gateway(config.rollout)
    if addresses := [f"{key}={value}" for key, value in servers.items() if value is not None]:
        raise ConfigError(
            f"{reason}, and a run with a network of its own cannot reach {' and '.join(addresses)}; {REMEDY}"
        )
    if not namespace.can_enter():
        raise ConfigError(
            f"{reason}, but this host does not allow a network namespace (root needs CAP_SYS_ADMIN, other users "
            f"kernel.unprivileged_userns_clone=1 or an AppArmor profile); {REMEDY}"
        )
    return reason


def _gateway(rollout: RolloutConfig) -> dict[str, str | None]:
    """Return the settings of a gateway that programs outside of the run must reach."""
    if episode_of(rollout) not in WITH_GATEWAY:
        return {}
    outside = {"rollout.harness": "null (programs take sessions by themselves)"} if rollout.harness is None else {}
    is_local = rollout.gateway_address in ("127.0.0.1", "::1", "localhost")
    return outside | {"rollout.gateway_address": None if is_local else rollout.gateway_address}


def _observers(observe: ObserveConfig) -> dict[str, str | None]:
    """Return the settings of trackers and the metrics endpoint that need a network; None: not used."""
    online = ", ".join(observe.online_trackers)
    return {
        "observe.trackers": f"[{online}] (observe.trackers_offline=true writes files instead)" if online else None,
        "observe.prometheus_port": str(observe.prometheus_port) if observe.prometheus_port else None,
    }


def check_remote_host(isolation: str, host: str, others: Sequence[str]) -> None:
    """Check a host of a Ray cluster that the run has joined. `isolation`: cluster.isolation.

    Raises: ConfigError if other users are logged in there.
    """
    if others and isolation != "none":
        raise ConfigError(
            f"cluster.isolation={isolation}: {_names(others)} logged in on {host}, and processes of a "
            f"Ray cluster that the run joins cannot be isolated from them; reserve the hosts, or {REMEDY}"
        )


def _names(users: Sequence[str]) -> str:
    shown = ", ".join(users[:3]) + (f" and {len(users) - 3} more" if len(users) > 3 else "")
    return f"{shown} {'is' if len(users) == 1 else 'are'}"


def other_users() -> list[str]:
    """Return the names of people other than the user of this process who are logged in or have processes here, sorted.

    Root is left out: it can read every process anyway. User ids without an account are left out too: the sandbox uses
    such ids. Where /proc hides the processes of others (hidepid), only login sessions are found.
    """
    uids = {*_process_owners(), *_session_owners()} - {os.getuid()}
    return sorted(name for uid in uids if FIRST_UID <= uid != NOBODY and (name := _account(uid)) is not None)


def _process_owners() -> Iterator[int]:
    for path in PROC.glob("[0-9]*"):
        with suppress(OSError):  # the process may end meanwhile
            yield path.stat().st_uid


def _session_owners() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(path.name) for path in LOGIN_SESSIONS.iterdir() if path.name.isdigit())
    for session in psutil.users():
        with suppress(KeyError):  # a name from a directory service that does not answer
            yield pwd.getpwnam(session.name).pw_uid


def _account(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None
