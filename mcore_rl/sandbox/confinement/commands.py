"""Command lines that confine a program and limit its resources: bubblewrap in new namespaces, or Landlock.

The bubblewrap command closes gaps of a default call: if root starts it, the user inside is the host's root and can
write /proc/sys; / and /dev are in-memory file systems without a size limit; code can create more namespaces; process 1
inside inherits the environment of bubblewrap.
"""

from __future__ import annotations

import json
import os
import pwd
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from mcore_rl.config.sandbox import BUBBLEWRAP, SandboxConfig
from mcore_rl.errors import SandboxError
from mcore_rl.sandbox.confinement.seccomp import filter_program

MIB = 1 << 20
SESSION_CPU_FACTOR = 10
"""Factor on cpu_seconds of an episode's interpreter or shell: all its cells share one process."""
INSIDE_UID = 1000
"""User id inside. It is not 0, because some programs refuse to run as root."""
WORK = "/tmp"
"""Working directory inside bubblewrap: in memory, removed with the run."""
_ISOLATION = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
    *("--cap-drop", "ALL", "--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID), "--hostname", "sandbox"),
)
_ROOT_LINKS = ("bin", "lib", "lib32", "lib64", "sbin")
SEARCHED = ("/etc/alternatives", "/etc/ld.so.cache")
"""Links to programs, and the dynamic linker's cache of libraries."""
LAUNCHER = Path(__file__).with_name("landlock_launcher.py")
_READABLE = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ssl/openssl.cnf", *SEARCHED)
_WRITABLE = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_STOP_SECONDS = 10.0
"""Time for the launcher to kill everything inside; afterwards it is killed itself."""
# Ranges of user ids: first id and number of ids.
_FAR = (1 << 30, 1 << 22)
_NEAR = (20_000, 40_000)  # for containers, which often have only 65,536 user ids


@dataclass
class RunLimits(SandboxConfig):
    """Limits of one run, derived from the configured ones.

    address_space: whether memory_mib also limits the address space of each process; some runtimes reserve far more
    than they use.
    """

    address_space: bool = True

    def prlimit(self, processes: int) -> list[str]:
        """Return a command prefix that sets the limits and executes the rest.

        It must run inside the namespace, since RLIMIT_NPROC counts processes per user and user namespace. Soft and hard
        limits are equal: otherwise code could ignore the signal of the soft limit and continue.
        """
        limits = {
            "nproc": (processes, resource.RLIMIT_NPROC),
            "cpu": (self.cpu_seconds, resource.RLIMIT_CPU),
            "fsize": (self.file_mib * MIB, resource.RLIMIT_FSIZE),
            "nofile": (self.open_files, resource.RLIMIT_NOFILE),
            # A core dump could be as large as the memory limit.
            "core": (0, resource.RLIMIT_CORE),
        }
        if self.address_space:
            limits["as"] = (self.memory_mib * MIB, resource.RLIMIT_AS)
        options = [f"--{name}={_lowered(value, which)}" for name, (value, which) in limits.items()]
        return ["/usr/bin/prlimit", *options, "--"]


def _lowered(value: int, which: int) -> int:
    """Return the smaller of `value` and the hard limit of this process; raising that limit would fail."""
    hard = resource.getrlimit(which)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


class Confinement(Protocol):
    """Bubblewrap or Landlock."""

    def command(self, inside: list[str], limits: RunLimits) -> tuple[list[str], list[int]]: ...

    def stop(self, process: subprocess.Popen[bytes]) -> None: ...


def confinement_of(config: SandboxConfig) -> Confinement:
    """Return the confinement of sandbox.kind. Raises: ConfigError on an unsupported processor architecture."""
    return Bubblewrap(config) if config.kind == BUBBLEWRAP else Landlock(config)


class Bubblewrap:
    """Confinement of sandbox.kind=bubblewrap."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._filter = filter_program(sockets=True)

    def command(self, inside: list[str], limits: RunLimits) -> tuple[list[str], list[int]]:
        """Return the command line and the descriptors that the child inherits. The caller closes the descriptors.

        Raises: SandboxError if bubblewrap is not installed.
        """
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxError("bubblewrap is not installed")
        descriptor = in_memory("filter", self._filter)
        variables = [word for item in environment(WORK).items() for word in ("--setenv", *item)]
        options = [*_ISOLATION, *self._files(limits), "--clearenv", *variables, "--seccomp", str(descriptor)]
        if may_mount_proc(program):
            options += ["--proc", "/proc"]
        # Must come last: nothing can be mounted on a read-only root.
        options += ["--remount-ro", "/", "--chdir", WORK]
        # RLIMIT_NPROC counts only processes of the sandbox's user namespace (since Linux 5.14).
        return [*_user(), program, *options, "--", *limits.prlimit(limits.processes), *inside], [descriptor]

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Kill bubblewrap. Process 1 of the namespace dies with it, and then all other processes of the namespace."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _files(self, limits: RunLimits) -> list[str]:
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
            *("--size", str(limits.tmp_mib * MIB), "--perms", "1777", "--tmpfs", "/tmp"),
            *(word for path in readable for word in ("--ro-bind", path, path)),
            *("--remount-ro", "/dev"),
        ]


def _user() -> list[str]:
    """Return a command prefix that drops root's rights: the rest runs as another user, without groups. Empty if this
    process is not root's."""
    if os.geteuid() != 0:
        return []
    uid = unused_uid(os.getpid())
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--"]


@cache
def may_mount_proc(program: str) -> bool:
    """Return whether /proc can be mounted inside. The kernel refuses it in containers that mask files of /proc."""
    command = [*_user(), program, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, cwd="/", env={"PATH": os.defpath}, check=False)
    return "mount proc" not in tried.stderr


class Landlock:
    """Confinement of sandbox.kind=landlock: a launcher confines the command and kills processes that remain.

    docs/sandbox.md lists what Landlock does not contain.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._filter = filter_program(sockets=False)

    def command(self, inside: list[str], limits: RunLimits) -> tuple[list[str], list[int]]:
        """Return the command line; the list of inherited descriptors is empty."""
        processes = limits.processes
        if os.geteuid() != 0:  # RLIMIT_NPROC counts all processes of this user
            processes += num_threads_of(os.geteuid())
        orders = {
            "readable": [*_READABLE, *map(os.path.abspath, self._config.read_only)],
            "writable": list(_WRITABLE),
            "filter": self._filter.hex(),
            "environment": environment(""),
            "users": list(uid_range()),
            "command": [*limits.prlimit(processes), *inside],
        }
        return [sys.executable, "-I", "-S", str(LAUNCHER), json.dumps(orders)], []

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Terminate the launcher, which then kills everything inside. Code inside cannot signal the launcher."""
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def environment(work: str) -> dict[str, str]:
    """Return the environment variables inside."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": work,
        "TMPDIR": work,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def in_memory(name: str, content: bytes) -> int:
    """Return a descriptor of an anonymous memory file that contains `content`."""
    descriptor = os.memfd_create(name)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def unused_uid(process: int) -> int:
    """Return a user id without an account, chosen by process id so that processes rarely share one."""
    first, count = uid_range()
    uid = first + process % count
    while _is_account(uid):
        uid += 1
    return uid


def uid_range() -> tuple[int, int]:
    """Return first and number of user ids that exist in this user namespace and are usually not accounts."""
    ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    highest = max(int(inside) + int(length) for inside, _, length in ranges)
    return _FAR if sum(_FAR) <= highest else _NEAR


def num_threads_of(uid: int) -> int:
    """Count the threads of a user on this machine; RLIMIT_NPROC limits this number."""
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # the process can end meanwhile
            if path.stat().st_uid == uid:
                count += len(os.listdir(path / "task"))
    return count


def _is_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
