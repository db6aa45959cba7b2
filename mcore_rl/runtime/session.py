"""Protection of a local Ray cluster from other users: its directory, its token, and its addresses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mcore_rl.weights.transports.hosts import remove_abandoned

PREFIX = "mcore_rl_"
TEMPORARY_PREFIX = f"{PREFIX}tmp_"
MAX_PARENT_CHARACTERS = 14
"""Maximum length of the parent directory: the paths of Ray's sockets are 92 characters longer, and Linux allows 107."""
SECONDS_TO_REMOVE = 5.0
"""Time limit for the removal: Ray's processes write logs for a short time after ray.shutdown."""
LOOPBACK = "127.0.0.1"
INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": LOOPBACK}
"""Interfaces for collectives and engines on one host; variables that the user has set stay."""
RAYLET_VARIABLES = {"RAY_worker_niceness": "0"}
"""Ray (2.60) starts workers with niceness 15; next to two busy processes of niceness 0 they get 3 % of the cores."""


def private_directory() -> contextlib.AbstractContextManager[Path]:
    """Make a directory for Ray's sockets and logs that no other user can enter, and remove it after the block. Before,
    remove directories that killed processes of this user have left.

    Ray (2.60) opens its own directory to all users, regardless of the umask; give it a subdirectory of this one.
    """
    parent = Path(tempfile.gettempdir())
    # A longer TMPDIR would make the paths of Ray's sockets too long.
    return _removed_directory(parent if len(str(parent)) <= MAX_PARENT_CHARACTERS else Path("/tmp"), PREFIX)


@contextlib.contextmanager
def temporary_files() -> Iterator[Path]:
    """Make a directory for the block, to be TMPDIR of the run's processes, and remove it with everything in it: engines
    and compilers (vLLM 0.32, torch 2.13) leave files and directories behind at every start.

    Other users can neither list nor write it. A root process opens it for traversal, because code in the sandbox runs
    under another user id and works in a directory of its own below.
    """
    with _removed_directory(Path(tempfile.gettempdir()), TEMPORARY_PREFIX) as directory:
        if os.geteuid() == 0:
            directory.chmod(0o711)
        yield directory


@contextlib.contextmanager
def _removed_directory(parent: Path, prefix: str) -> Iterator[Path]:
    remove_abandoned(parent)
    directory = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}_", dir=parent))
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        # remove_abandoned() deletes directories that nobody locks. Unlike a process id, a lock is also visible in other
        # pid namespaces.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield directory
    finally:
        deadline = time.monotonic() + SECONDS_TO_REMOVE
        while directory.exists() and time.monotonic() < deadline:
            shutil.rmtree(directory, ignore_errors=True)
            time.sleep(0.1)
        # The lock is released only now, after the directory is gone.
        os.close(descriptor)


@contextlib.contextmanager
def loopback_session() -> Iterator[Path]:
    """Restrict a cluster that this process starts in the block to connections from this host with a new token. Yields
    the directory for Ray."""
    with private_directory() as directory, temporary_files() as temporary:
        token = directory / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32))
        sockets = directory / "vllm"
        sockets.mkdir()
        ours = INTERFACES | RAYLET_VARIABLES | {"VLLM_RPC_BASE_PATH": str(sockets)}
        variables = {name: os.environ.get(name, value) for name, value in ours.items()} | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "TMPDIR": str(temporary),
            # Makes all processes of Ray (2.60) use only the loopback address. With _node_ip_address=127.0.0.1, Ray uses
            # the network address instead.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        try:
            with _environment(variables, without="RAY_AUTH_TOKEN"):
                _reload_environment()
                # A short name, because the paths of Ray's sockets are long.
                yield directory / "r"
        finally:
            _reload_environment()


@contextlib.contextmanager
def _environment(variables: dict[str, str], without: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in (*variables, without)}
    os.environ.pop(without, None)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _reload_environment() -> None:
    """Make Ray (2.60) read environment variables again that it read during its import."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config

    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, True)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
