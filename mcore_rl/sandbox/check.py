"""Tries the configured sandbox before anything depends on it, and says what to do where it is refused."""

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
"""That a program may take here at least, whatever those of a run may: a busy machine is not a broken one."""
_SERVER = "sandbox.url to a SandboxFusion server"


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """What runs whole programs: the server of sandbox.url, else this machine."""
    return FusionSandbox(config) if config.url else LocalSandbox(config)


def check_sandbox(config: SandboxConfig) -> None:
    """Runs the real command line with `true`, and Python with nothing; of a server, Python with nothing.

    Raises: ConfigError in the sandbox's own words.
    """
    if config.url:
        _check_server(config)
    else:
        check_local(config)


def check_local(config: SandboxConfig) -> None:
    """As check_sandbox, of this machine, where interpreters and shells run whatever sandbox.url says."""
    sandbox = LocalSandbox(replace(config, seconds=max(SECONDS, config.seconds)))
    if words := _failure_of(sandbox, ["/usr/bin/true"]):
        raise ConfigError(f"sandbox.kind={config.kind}: {words}; {_remedy(config, words)}")
    if words := _failure_of(sandbox, [os.path.abspath(config.python), "-c", ""]):
        raise ConfigError(
            f"sandbox.python={config.python} does not run inside: {words}; set it to a "
            "Python in /usr, or name its directories in sandbox.read_only (every user has to be able to read them)"
        )


def _failure_of(sandbox: LocalSandbox, command: list[str]) -> str | None:
    try:
        outcome = sandbox.execute(command)
    except SandboxError as error:
        return str(error)
    ended = f"{command[0]} ended with {outcome.return_code} ({outcome.why})"
    return None if outcome.ok else outcome.stderr.strip() or ended


def _remedy(config: SandboxConfig, words: str) -> str:
    if config.kind != BUBBLEWRAP:
        return f"set {_SERVER}"
    if "not installed" in words:
        return f"`make sandbox` installs it; or set sandbox.kind=landlock, {LANDLOCK_LACKS}, or {_SERVER}"
    others = f"sandbox.kind=landlock, {LANDLOCK_LACKS}, or {_SERVER}"
    return f"let this machine or container make user namespaces, or set {others}"


def _check_server(config: SandboxConfig) -> None:
    try:
        outcome = FusionSandbox(config).run(Program(""))
    except SandboxError as error:
        raise ConfigError(f"{error}; start the server or set sandbox.url") from error
    if not outcome.ok:
        raise ConfigError(f"sandbox.url={config.url}: an empty Python program failed there: {outcome.stderr.strip()}")
