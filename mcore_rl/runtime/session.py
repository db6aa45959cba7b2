"""What keeps others out of a Ray cluster that we start: its directory, its token, and the addresses it listens on."""

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

PREFIX = "mcore_rl_"
TEMPORARY_PREFIX = f"{PREFIX}tmp_"
MAX_PARENT_CHARACTERS = 14
"""Of the directory's parent: Ray's sockets lie 92 characters deeper, and Linux allows 107."""
SECONDS_TO_LET_GO = 5.0
"""Ray's processes write to their logs until they are gone, a little after ray.shutdown."""
LOOPBACK = "127.0.0.1"
INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": LOOPBACK}
"""Where collectives and engines of one machine meet; what the user has set stays."""
OF_RAYLETS = {"RAY_worker_niceness": "0"}
"""Ray (2.60) starts workers with niceness 15: beside two busy processes of niceness 0 they get 3 % of the cores."""


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A directory for Ray's sockets and logs that no other user can enter, gone when the block ends. Whatever killed
    processes of this user have left is removed first.

    Ray (2.60) opens its own directory to everybody, whatever the umask: give it one inside of this.
    """
    parent = Path(tempfile.gettempdir())
    parent = parent if len(str(parent)) <= MAX_PARENT_CHARACTERS else Path("/tmp")
    with _removed_directory(parent, PREFIX) as directory:
        yield directory


@contextlib.contextmanager
def temporary_files() -> Iterator[Path]:
    """Make a directory for the block that is meant as TMPDIR of a run's processes, and remove it with everything that
    they left: engines and compilers (vLLM 0.32, torch 2.13) leave files and directories there at every start.

    Other users can neither list nor write it. A root process opens it for traversal, because code in the sandbox runs
    under another user id and works in a directory of its own below.
    """
    with _removed_directory(Path(tempfile.gettempdir()), TEMPORARY_PREFIX) as directory:
        if os.geteuid() == 0:
            directory.chmod(0o711)
        yield directory


@contextlib.contextmanager
def _removed_directory(parent: Path, prefix: str) -> Iterator[Path]:
    remove_stale(parent)
    directory = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}_", dir=parent))
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        # Held while this process lives: how remove_stale() knows the dead, in other pid namespaces too.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield directory
    finally:
        deadline = time.monotonic() + SECONDS_TO_LET_GO
        while directory.exists() and time.monotonic() < deadline:
            shutil.rmtree(directory, ignore_errors=True)
            time.sleep(0.1)
        os.close(descriptor)


def remove_stale(parent: Path) -> None:
    """Removes directories whose makers were killed."""
    for path in parent.glob(f"{PREFIX}*_*"):
        pid = path.name.removeprefix(TEMPORARY_PREFIX).removeprefix(PREFIX).split("_")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _remove_dead(path)


def _remove_dead(path: Path) -> None:
    """Removes the directory if it is one, ours, and a living process of another pid namespace does not hold it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def loopback_session() -> Iterator[Path]:
    """Until the block ends, a cluster that this process starts is reached from this machine alone, by those who hold a
    token of its own. Yields the directory to give to Ray."""
    with private_directory() as directory, temporary_files() as temporary:
        token = directory / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32))
        sockets = directory / "vllm"
        sockets.mkdir()
        ours = INTERFACES | OF_RAYLETS | {"VLLM_RPC_BASE_PATH": str(sockets)}
        variables = {name: os.environ.get(name, value) for name, value in ours.items()} | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "TMPDIR": str(temporary),
            # Of Ray 2.60, all of whose processes then take the loopback address, and listen on nothing else. Asked for
            # 127.0.0.1 by _node_ip_address, it takes the address of the network instead.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        try:
            with _environment(variables, without="RAY_AUTH_TOKEN"):
                _read_environment_anew()
                yield directory / "r"
        finally:
            _read_environment_anew()


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


def _read_environment_anew() -> None:
    """Ray (2.60) has read it when it was imported."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config

    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, True)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
