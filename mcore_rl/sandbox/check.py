"""Construction and preflight check of the configured sandbox."""

from __future__ import annotations

import os
from dataclasses import replace

from mcore_rl.config.sandbox import BUBBLEWRAP, SandboxConfig
from mcore_rl.errors import ConfigError, SandboxError
from mcore_rl.sandbox.fusion import FusionSandbox
from mcore_rl.sandbox.interface import Program, Sandbox
from mcore_rl.sandbox.local import LocalSandbox

LANDLOCK_LACKS = "which does not bound the disk or bound and hide processes as well"
SECONDS = 30.0
"""Minimum time limit of the check: even a trivial program can take longer than sandbox.seconds on a busy machine."""
_SERVER = "sandbox.url to a SandboxFusion server"


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Return the sandbox for whole programs: the server at sandbox.url if set, otherwise this machine."""
    return FusionSandbox(config) if config.url else LocalSandbox(config)


def check_sandbox(config: SandboxConfig) -> None:
    """Run an empty Python program in the configured sandbox, and `true` if the sandbox is local.

    Raises: ConfigError with the sandbox's own message and the remedy.
    """
    if not config.url:
        return check_local(config)
    try:
        outcome = FusionSandbox(config).run(Program(""))
    except SandboxError as error:
        raise ConfigError(f"{error}; start the server or set sandbox.url") from error
    if not outcome.ok:
        raise ConfigError(f"sandbox.url={config.url}: an empty Python program failed there: {outcome.stderr.strip()}")
    return None


def check_local(config: SandboxConfig) -> None:
    """Check this machine's sandbox, which interpreters and shells use even if sandbox.url is set.

    Raises: ConfigError with the sandbox's own message and the remedy.
    """
    sandbox = LocalSandbox(replace(config, seconds=max(SECONDS, config.seconds)))
    # Two steps show whether the sandbox fails, or only its Python.
    if message := _failure_of(sandbox, ["/usr/bin/true"]):
        raise ConfigError(f"sandbox.kind={config.kind}: {message}; {_remedy(config, message)}")
    if message := _failure_of(sandbox, [os.path.abspath(config.python), "-c", ""]):
        raise ConfigError(
            f"sandbox.python={config.python} does not run inside: {message}; set it to a "
            "Python in /usr, or name its directories in sandbox.read_only (every user has to be able to read them)"
        )


def _failure_of(sandbox: LocalSandbox, command: list[str]) -> str | None:
    try:
        outcome = sandbox.execute(command)
    except SandboxError as error:
        return str(error)
    ended = f"{command[0]} ended with {outcome.return_code} ({outcome.why})"
    return None if outcome.ok else outcome.stderr.strip() or ended


def _remedy(config: SandboxConfig, message: str) -> str:
    if config.kind != BUBBLEWRAP:
        return f"set {_SERVER}"
    if "not installed" in message:
        return f"`make sandbox` installs it; or set sandbox.kind=landlock, {LANDLOCK_LACKS}, or {_SERVER}"
    others = f"sandbox.kind=landlock, {LANDLOCK_LACKS}, or {_SERVER}"
    return f"allow user namespaces on this machine or in this container, or set {others}"
