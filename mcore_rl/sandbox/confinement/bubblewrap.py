"""Command line of a sandbox in new namespaces.

It closes gaps of a default bubblewrap call: started by root, the user inside is the host's root and can write
/proc/sys; / and /dev are in-memory file systems without a size limit; code can create more namespaces; process 1 inside
inherits the environment of bubblewrap.
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
"""User id inside: programs that refuse to run as root work also in a sandbox that root starts."""
WORK = "/tmp"
"""Working directory inside: in memory, removed with the run."""
_ROOT_LINKS = ("bin", "lib", "lib32", "lib64", "sbin")


class Bubblewrap:
    """Confinement of sandbox.kind=bubblewrap."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._filter = filter_program(sockets=True)

    def command(self, inside: list[str], limits: Limits) -> tuple[list[str], list[int]]:
        """Return the command line and the descriptors that the child inherits. The caller closes the descriptors.

        Raises: SandboxError if bubblewrap is not installed.
        """
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxError("bubblewrap is not installed")
        descriptor = in_memory("filter", self._filter)
        options = [*self._isolation(), *self._files(limits), *self._environment(), "--seccomp", str(descriptor)]
        if may_mount_proc(program):
            options += ["--proc", "/proc"]
        # Must come last: nothing can be mounted on a read-only root.
        options += ["--remount-ro", "/", "--chdir", WORK]
        # RLIMIT_NPROC counts only processes of the sandbox's user namespace (since Linux 5.14).
        return [*_user(), program, *options, "--", *limits.prlimit(limits.processes), *inside], [descriptor]

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Kill bubblewrap. Process 1 of the namespace dies with it, and with process 1 all others."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _isolation(self) -> list[str]:
        return [
            *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
            *("--cap-drop", "ALL", "--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID), "--hostname", "sandbox"),
        ]

    def _files(self, limits: Limits) -> list[str]:
        """Return the mount options. Later mounts cover earlier ones.

        Only /tmp and /dev/shm are writable, and both have a size limit.
        """
        readable = [os.path.abspath(path) for path in self._config.read_only]
        links = [name for name in _ROOT_LINKS if os.path.islink(f"/{name}")]
        real = [f"/{name}" for name in _ROOT_LINKS if not os.path.islink(f"/{name}") and os.path.isdir(f"/{name}")]
        return [
            *("--ro-bind", "/usr", "/usr"),
            *(word for name in links for word in ("--symlink", os.readlink(f"/{name}"), f"/{name}")),
            *(word for path in real for word in ("--ro-bind", path, path)),
            # From /etc only the search paths of programs and libraries: no users, hosts or secrets.
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
    """Return whether /proc can be mounted inside. The kernel refuses it in containers that mask files of /proc."""
    command = [*_user(), program, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, cwd="/", env={"PATH": os.defpath}, check=False)
    return "mount proc" not in tried.stderr


SEARCHED = ("/etc/alternatives", "/etc/ld.so.cache")
"""Links to programs, and the dynamic linker's cache of libraries."""


def environment(work: str) -> dict[str, str]:
    """Return the environment variables inside."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": work,
        "TMPDIR": work,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
