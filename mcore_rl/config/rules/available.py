"""What a configuration may ask for and this version, or this machine, cannot run."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import NamedTuple

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
    """What to do where responses or a judge's answers are sampled by an engine that is not on this machine."""
    key = next((engines.key for engines in _engines(config) if engines.engine == "sglang"), None)
    if key is None:
        return None
    python, version = sglang_python(), sglang_version()
    if python.is_file() and version == SGLANG_VERSION:
        return None
    found = f"has {f'SGLang {version}' if version else 'no SGLang'}" if python.is_file() else "is not there"
    return (
        f"{key}=sglang: {python} {found}, and SGLang {SGLANG_VERSION} is needed; run `make sglang`, or name "
        f"in {SGLANG_PYTHON} the interpreter of an environment with it"
    )


def cannot_run(config: Config) -> list[str]:
    """What this version lacks for the configuration to run, each beginning with its key; [] where it lacks nothing."""
    cluster = config.cluster
    problems = []
    for engines in _engines(config):
        if engines.engine == "vllm":
            continue
        limits = {
            "cluster.device=cuda": cluster.device == "cuda",
            f"cluster.nodes={cluster.nodes}": cluster.nodes > 1,
            f"{engines.section}.tp={engines.tp}": engines.tp > 1,
        }
        problems += [
            f"{engines.key}=sglang runs on one host's CPU, with engines of one rank: {key} needs {engines.key}=vllm"
            for key, exceeded in limits.items()
            if exceeded
        ]
    return list(dict.fromkeys(problems))


class _Engines(NamedTuple):
    """Those of a section, and the key that chose them."""

    section: str
    key: str
    engine: str
    tp: int


def _engines(config: Config) -> list[_Engines]:
    """Every kind that the run starts, each once: a judge's too."""
    if is_supervised(config.algorithm):
        return []
    rollout, judge = config.rollout, config.judge
    found = [_Engines("rollout", "rollout.engine", rollout.engine, rollout.tp)]
    if judge.hf_path is not None:
        key = "rollout.engine" if judge.engine is None else "judge.engine"
        found.append(_Engines("judge", key, judge.engine or rollout.engine, judge.tp))
    return found
