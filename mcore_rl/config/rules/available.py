"""What a configuration may ask for and this version, or this machine, cannot run."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from mcore_rl.config.algorithm import is_supervised
from mcore_rl.config.schema import Config

SGLANG_PYTHON = "MCORE_RL_SGLANG_PYTHON"
"""Environment variable that names the interpreter of SGLang's environment."""

SGLANG_VERSION = "0.5.23"
"""Whose internals are used: no other one will do."""


def sglang_python() -> Path:
    """Where it is by default: `make sglang` puts it there."""
    beside = Path(__file__).parents[3] / ".venv-sglang" / "bin" / "python"
    return Path(os.environ.get(SGLANG_PYTHON, beside))


def sglang_version() -> str | None:
    """That of its environment, whose packages are looked up and not imported; None where there is none."""
    for packages in sglang_python().parents[1].glob("lib/python3*/site-packages"):
        for distribution in importlib.metadata.distributions(name="sglang", path=[str(packages)]):
            return distribution.version
    return None


def missing_engine(config: Config) -> str | None:
    """What to do where responses are sampled by an engine that is not on this machine."""
    if is_supervised(config.algorithm) or config.rollout.engine == "vllm":
        return None
    python, version = sglang_python(), sglang_version()
    if python.is_file() and version == SGLANG_VERSION:
        return None
    found = f"has {f'SGLang {version}' if version else 'no SGLang'}" if python.is_file() else "is not there"
    return (
        f"rollout.engine=sglang: {python} {found}, and SGLang {SGLANG_VERSION} is needed; run `make sglang`, or name "
        f"in {SGLANG_PYTHON} the interpreter of an environment with it"
    )


def cannot_run(config: Config) -> list[str]:
    """What this version lacks for the configuration to run, each beginning with its key; [] where it lacks nothing."""
    rollout, cluster = config.rollout, config.cluster
    if is_supervised(config.algorithm) or rollout.engine == "vllm":
        return []
    limits = {
        "cluster.device=cuda": cluster.device == "cuda",
        f"cluster.nodes={cluster.nodes}": cluster.nodes > 1,
        f"rollout.tp={rollout.tp}": rollout.tp > 1,
    }
    return [
        f"rollout.engine=sglang runs on one host's CPU, with engines of one rank: {key} needs rollout.engine=vllm"
        for key, exceeded in limits.items()
        if exceeded
    ]
