"""Section `sandbox`: execution of code written by a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.fields import setting

BUBBLEWRAP = "bubblewrap"
LANDLOCK = "landlock"


@dataclass
class SandboxConfig:
    """Sandbox for a model's code, and its resource limits; docs/sandbox.md describes what is contained."""

    kind: str = setting(BUBBLEWRAP, choices=(BUBBLEWRAP, LANDLOCK))
    """bubblewrap: private namespaces (installed by `make sandbox`); landlock: weaker containment for containers that do
    not allow namespaces."""
    url: str | None = None
    """Address of a SandboxFusion server, such as http://host:8080, that runs whole programs; null: programs run on the
    calling host. Interpreters and shells of episodes always run on the calling host."""
    python: str = "/usr/bin/python3"
    """Interpreter inside the sandbox: an absolute path in /usr or in a directory of sandbox.read_only."""
    read_only: list[str] = field(default_factory=list)
    """Directories that the code may read in addition to /usr, such as a virtual environment; they must be readable by
    all users."""
    seconds: float = setting(10.0, above=0)
    """Time limit of a program, or of one cell of an interpreter."""
    cpu_seconds: int = setting(10, minimum=1)
    """Processor time limit of one process; interpreters and shells, whose cells share a process, get ten times as
    much."""
    memory_mib: int = setting(1024, minimum=64)
    """Limit of one process's address space, and of the memory of all processes of a program together."""
    processes: int = setting(32, minimum=4)
    """Maximum number of processes and threads at a time."""
    file_mib: int = setting(16, minimum=1)
    """Maximum size of one file."""
    tmp_mib: int = setting(64, minimum=1)
    """Maximum total size of the files that a program writes, and of those returned from it; with landlock, only of the
    returned files."""
    output_kib: int = setting(64, minimum=1)
    """Maximum output of a program or cell; more output is cut off."""
    open_files: int = setting(128, minimum=16)
    """Maximum number of open file descriptors per process."""
    max_running: int | None = setting(None, minimum=1)
    """Maximum number of concurrent programs and cells per process of the run; others wait. null: number of cores."""
