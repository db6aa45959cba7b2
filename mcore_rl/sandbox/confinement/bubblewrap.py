"""The command line of a sandbox in namespaces of its own.

What usual ones forget, and what came of it where it was tried: as root the user inside is the host's root and may
write /proc/sys; / and /dev are file systems in memory without a size; code may make namespaces of its own; the
environment that bubblewrap was started with is that of process 1 inside.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from functools import cache

from mcore_rl.config.sandbox import SandboxConfig
from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.confinement.descriptors import in_memory
from mcore_rl.sandbox.confinement.limits import MIB, Limits
from mcore_rl.sandbox.confinement.seccomp import filter_program
from mcore_rl.sandbox.confinement.users import run_as, unused_uid

INSIDE_UID = 1000
WORK = "/tmp"
"""Where code finds itself: in memory, gone with the run."""
_ROOT_LINKS = ("bin", "lib", "lib32", "lib64", "sbin")


class Bubblewrap:
    """Starts commands in bubblewrap; `kind` of the configuration."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._filter = filter_program(sockets=True)

    def command(self, inside: list[str], limits: Limits) -> tuple[list[str], list[int]]:
        """The command line, and file descriptors that it has to inherit and its caller to close.

        Raises: SandboxError if bubblewrap is not installed.
        """
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxError("bubblewrap is not installed")
        descriptor = in_memory("filter", self._filter)
        options = [*self._isolation(), *self._files(limits), *self._environment(), "--seccomp", str(descriptor)]
        if may_mount_proc(program):
            options += ["--proc", "/proc"]
        # The last, since what comes later could not be mounted on it.
        options += ["--remount-ro", "/", "--chdir", WORK]
        # Processes are counted in the user namespace of the sandbox, whatever else its user runs outside (Linux 5.14).
        return [*_user(), program, *options, "--", *limits.prlimit(limits.processes), *inside], [descriptor]

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ends everything inside: process 1 of the namespace dies with bubblewrap, and the others with it."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _isolation(self) -> list[str]:
        return [
            *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
            *("--cap-drop", "ALL", "--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID), "--hostname", "sandbox"),
        ]

    def _files(self, limits: Limits) -> list[str]:
        """Everything that is written lies in /tmp or /dev/shm, which have a size; what comes first is overlaid."""
        readable = [os.path.abspath(path) for path in self._config.read_only]
        links = [name for name in _ROOT_LINKS if os.path.islink(f"/{name}")]
        real = [f"/{name}" for name in _ROOT_LINKS if not os.path.islink(f"/{name}") and os.path.isdir(f"/{name}")]
        return [
            *("--ro-bind", "/usr", "/usr"),
            *(word for name in links for word in ("--symlink", os.readlink(f"/{name}"), f"/{name}")),
            *(word for path in real for word in ("--ro-bind", path, path)),
            # Of /etc only how programs and libraries are found: nothing of users, hosts or secrets.
            *(word for path in SEARCHED for word in ("--ro-bind-try", path, path)),
            *("--dev", "/dev"),
            *("--size", str(MIB), "--perms", "1777", "--tmpfs", "/dev/shm"),
            *("--size", str(limits.tmp_bytes), "--perms", "1777", "--tmpfs", "/tmp"),
            *(word for path in readable for word in ("--ro-bind", path, path)),
            *("--remount-ro", "/dev"),
        ]

    def _environment(self) -> list[str]:
        variables = environment(WORK)
        return ["--clearenv", *(word for item in variables.items() for word in ("--setenv", *item))]


def _user() -> list[str]:
    return run_as(unused_uid(os.getpid())) if os.geteuid() == 0 else []


@cache
def may_mount_proc(program: str) -> bool:
    """False in containers that mask files of /proc: the kernel mounts it there for nobody, and code does without."""
    command = [*_user(), program, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, cwd="/", env={"PATH": os.defpath}, check=False)
    return "mount proc" not in tried.stderr


SEARCHED = ("/etc/alternatives", "/etc/ld.so.cache")


def environment(work: str) -> dict[str, str]:
    """What code inside sees."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": work,
        "TMPDIR": work,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
