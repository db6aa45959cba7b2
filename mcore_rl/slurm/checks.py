"""Checks of the configuration before a job script is rendered."""

from __future__ import annotations

import re

from mcore_rl.config.fields import check_domains
from mcore_rl.config.schema import Config, SlurmConfig
from mcore_rl.errors import ConfigError

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_WORDS = {"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS"}
LOCATION_WORDS = {"PATH", "FILE", "DIR", "URL"}
"""Last words of variables that contain the location of a secret instead of the secret."""


def check_job(config: Config) -> None:
    """Check the keys of a job. Raises: ConfigError for the first invalid one."""
    check_domains(config)
    slurm, cluster = config.slurm, config.cluster
    if cluster.device == "auto":
        raise ConfigError("cluster.device must be cuda or cpu for a SLURM job: it decides whether GPUs are requested")
    if cluster.address is not None:
        raise ConfigError("cluster.address must be null: a SLURM job starts its own Ray cluster")
    limit = seconds(slurm.time_limit)
    if limit is not None and limit <= slurm.grace_seconds:
        raise ConfigError(
            f"slurm.grace_seconds={slurm.grace_seconds} must be below slurm.time_limit={slurm.time_limit}"
        )
    if (slurm.container == "none") != (slurm.container_image is None):
        raise ConfigError("slurm.container_image must be set when slurm.container is pyxis or apptainer, and only then")
    if slurm.container == "none" and slurm.container_mounts:
        raise ConfigError("slurm.container_mounts needs slurm.container=pyxis or apptainer")
    _check_variables(slurm)
    _check_text(slurm, config.run.dir)


def seconds(time_limit: str) -> int | None:
    """Parse a time limit: [days-]hours:minutes:seconds and its short forms. Returns None for no limit.

    Raises: ConfigError.
    """
    if time_limit.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _TIME.fullmatch(time_limit)
    if match is None:
        raise ConfigError(f"slurm.time_limit={time_limit} must look like 04:00:00 or 2-12:00:00")
    numbers = [int(part) for part in match.groups()[1:] if part is not None]
    if match["days"] is None and len(numbers) < 3:  # minutes or minutes:seconds; hours follow days
        numbers = [0, *numbers]
    units = (3600, 60, 1)
    return int(match["days"] or 0) * 86400 + sum(n * unit for n, unit in zip(numbers, units, strict=False))


def looks_secret(name: str) -> bool:
    """Return whether the name suggests a secret, such as HF_TOKEN, but not TOKENIZERS_PARALLELISM or HF_TOKEN_PATH."""
    words = name.upper().split("_")
    return bool(SECRET_WORDS & set(words)) and words[-1] not in LOCATION_WORDS


def _check_variables(slurm: SlurmConfig) -> None:
    for key, names in (("environment", list(slurm.environment)), ("pass_environment", slurm.pass_environment)):
        for name in names:
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(f"slurm.{key}: {name!r} cannot be the name of a variable")
    for name in slurm.environment:
        if name in slurm.pass_environment:
            raise ConfigError(f"slurm.environment.{name} is in slurm.pass_environment too; remove it from one of them")
        if looks_secret(name):
            raise ConfigError(
                f"slurm.environment.{name} looks like a secret, but the job script would contain its value; remove it, "
                f"set slurm.pass_environment=[{name}], and export {name} in the shell that calls sbatch"
            )


def _check_text(slurm: SlurmConfig, run_dir: str) -> None:
    for option in slurm.extra:
        if not option.startswith("-"):
            raise ConfigError(f"slurm.extra: {option!r} must be an option of sbatch, such as --constraint=h100")
    one_line = {
        "run.dir": run_dir,
        "slurm.job_name": slurm.job_name,
        "slurm.partition": slurm.partition,
        "slurm.account": slurm.account,
        "slurm.qos": slurm.qos,
        "slurm.exclude": slurm.exclude,
        "slurm.extra": " ".join(slurm.extra),
    }
    for key, value in one_line.items():
        if value is not None and re.search(r"[\x00-\x1f]", value):
            raise ConfigError(
                f"{key} must not contain line breaks or control characters: it is part of an #SBATCH line or a path"
            )
