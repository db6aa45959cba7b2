"""Section of the sandbox, in which code that a model wrote is run."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_rl.config.fields import setting

BUBBLEWRAP = "bubblewrap"
LANDLOCK = "landlock"


@dataclass
class SandboxConfig:
    """Where code of a model runs and how much it may take; docs/sandbox.md says what is contained."""

    kind: str = setting(BUBBLEWRAP, choices=(BUBBLEWRAP, LANDLOCK))
    """bubblewrap (namespaces of its own; `make sandbox` installs it) | landlock, for containers that refuse namespaces:
    it contains less."""
    url: str | None = None
    """Address of a SandboxFusion server, such as http://host:8080, that runs whole programs instead; null: they run on
    the host that asks. Interpreters and shells of an episode always do."""
    python: str = "/usr/bin/python3"
    """Interpreter inside, an absolute path in /usr or in one of sandbox.read_only."""
    read_only: list[str] = field(default_factory=list)
    """Directories beside /usr that code may read, such as a virtual environment; every user has to be able to."""
    seconds: float = setting(10.0, above=0)
    """Of one run, or one cell of an interpreter."""
    cpu_seconds: int = setting(10, minimum=1)
    """Processor time of one process; an interpreter or a shell, whose cells share it, gets ten times as much."""
    memory_mib: int = setting(1024, minimum=64)
    """Address space of one process, and memory of all of a run together."""
    processes: int = setting(32, minimum=4)
    """Processes and threads at once."""
    file_mib: int = setting(16, minimum=1)
    """Of one file."""
    tmp_mib: int = setting(64, minimum=1)
    """Of all files together, and of those fetched; of landlock only the latter."""
    output_kib: int = setting(64, minimum=1)
    """Of a run or a cell, whose end is more."""
    open_files: int = setting(128, minimum=16)
    """File descriptors of one process."""
    max_running: int | None = setting(None, minimum=1)
    """Runs and cells at once in one process of the run, others wait; null: as many as it has cores."""
