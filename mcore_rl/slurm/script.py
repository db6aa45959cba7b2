"""Job script of a configuration: #SBATCH lines and variables, followed by job.sh.

All values are quoted with shlex, so paths can contain blanks and quotes.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from mcore_rl.config.reading.overrides import with_override
from mcore_rl.config.rules.judge import uses_judge
from mcore_rl.config.rules.models import uses_reward_model
from mcore_rl.config.schema import ClusterConfig, Config, SlurmConfig
from mcore_rl.slurm.checks import check_job

PROGRAM = Path(__file__).with_name("job.sh")
ENVIRONMENT = ("slurm.environment", "slurm=")
"""Beginnings of overrides that may contain values of slurm.environment."""
# 1 connection: Megatron's overlap of communication and computation requires a single hardware queue per device.
GPU_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_DEBUG": "WARN"}


def render_job(
    config: Config,
    files: Sequence[str],
    overrides: Sequence[str] = (),
    pinned: Sequence[str] = (),
    *,
    force: bool = False,
) -> str:
    """Return a job script that runs `mcore-rl train files... overrides...` in the directory config.run.dir.

    pinned: further overrides, with the commits of names on the hub.
    force: whether the command was called with --force; recorded in a comment only.

    Raises: ConfigError.
    """
    check_job(config)
    options = [*(["--force"] if force else []), *files, *(_without_value(override) for override in overrides)]
    command = shlex.join(["mcore-rl", "slurm", *options])
    lines = [
        "#!/usr/bin/env bash",
        f"# Rendered by: {command}".replace("\n", " "),
        "# Relative paths start at the directory in which sbatch is called.",
        *(f"#SBATCH {option}" for option in _options(config.slurm, config.cluster)),
        "",
        *_values(config, files, [*overrides, *pinned]),
        "",
    ]
    return "\n".join(lines) + PROGRAM.read_text(encoding="utf-8")


def _options(slurm: SlurmConfig, cluster: ClusterConfig) -> list[str]:
    chosen = {
        "job-name": slurm.job_name,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "exclude": slurm.exclude,
        "nodes": str(cluster.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(cluster.gpus_per_node) if cluster.device == "cuda" else None,
        "cpus-per-task": str(slurm.cpus_per_node) if slurm.cpus_per_node is not None else None,
        "time": slurm.time_limit,
        # SLURM signals only the batch script (B) `grace_seconds` before the time limit; the script signals the run.
        "signal": f"B:USR1@{slurm.grace_seconds}",
        # A requeued job appends to the same log.
        "open-mode": "append",
        "output": "%x.%j.log",
    }
    options = [f"--{name}={shlex.quote(value)}" for name, value in chosen.items() if value is not None]
    whole_nodes = ["--exclusive", "--mem=0"] if slurm.cpus_per_node is None else []
    return [*options, *whole_nodes, "--requeue", *(_quoted_option(option) for option in slurm.extra)]


def _quoted_option(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else shlex.quote(option)


def _values(config: Config, files: Sequence[str], overrides: Sequence[str]) -> list[str]:
    cluster, slurm = config.cluster, config.slurm
    gpus = cluster.gpus_per_node if cluster.device == "cuda" else 0
    # All users of a node can list command lines, so tasks receive slurm.environment in a file.
    visible = [override for override in overrides if not override.startswith(ENVIRONMENT)]
    # The default of run.dir would be another directory after the job is queued again.
    words = [*files, *with_override(visible, "run.dir", config.run.dir)]
    node_options = {
        "--cpus": _ray_cpus(config),
        "--gpus": gpus,
        "--object-store-bytes": int(cluster.object_store_gib * 2**30),
        "--timeout-seconds": slurm.start_timeout_seconds,
    }
    return [
        f"num_nodes={cluster.nodes}",
        f"run_dir=$(realpath -m -- {shlex.quote(config.run.dir)})",
        f"grace_seconds={slurm.grace_seconds}",
        f"start_timeout_seconds={slurm.start_timeout_seconds}",
        f"enter={shlex.quote(_enter(slurm, on_gpus=gpus > 0))}",
        f"passed=({shlex.join(slurm.pass_environment)})",
        f"container=({_container(slurm, on_gpus=gpus > 0)})",
        f"check=({shlex.join(['python', '-m', 'mcore_rl.slurm.node_check', '--gpus', str(gpus)])})",
        f"fabric=({shlex.join(_fabric_test(slurm, cluster))})",
        f"node=({shlex.join(['python', '-m', 'mcore_rl.slurm.ray_node', *_flat(node_options)])})",
        f"run=({shlex.join(['python', '-m', 'mcore_rl.cli', 'train', *words])})",
    ]


def _fabric_test(slurm: SlurmConfig, cluster: ClusterConfig) -> list[str]:
    """Return the command of the fabric test; empty if it is disabled."""
    if not slurm.fabric_test:
        return []
    options = {
        "--nodes": cluster.nodes,
        "--slots": cluster.gpus_per_node,
        # A stage that hangs must time out before the whole test does, so that its ranks are named.
        "--timeout-seconds": max(1, slurm.start_timeout_seconds // 8),
        "--slow-percent": slurm.fabric_slow_percent,
    }
    return ["python", "-m", "mcore_rl.slurm.fabric_node", *_flat(options)]


def _without_value(override: str) -> str:
    """Hide a value of slurm.environment in the comment with the command."""
    return override.partition("=")[0] + "=..." if override.startswith(ENVIRONMENT) else override


def _flat(options: dict[str, int]) -> list[str]:
    return [word for name, value in options.items() for word in (name, str(value))]


def _ray_cpus(config: Config) -> int:
    """Return the number of CPUs that a node offers Ray: one per rank of policy, critic, reward model and teachers, and
    of all engines, and one more. A critic is assumed: whether there is one depends on the advantage estimator."""
    slots, nodes, rollout, judge = config.cluster.gpus_per_node, config.cluster.nodes, config.rollout, config.judge
    # Round up, for the node with the most engines.
    engines = max(slots, -(-rollout.num_engines // nodes) * rollout.tp)
    judges = max(slots, -(-judge.num_engines // nodes) * judge.tp) if uses_judge(judge) else 0
    taught = len(config.teacher.entries)
    teachers = -(-taught * config.teacher.num_engines // nodes) * config.teacher.tp
    teachers = max(slots if taught else 0, teachers, taught * min(config.teacher.num_ranks, slots))
    return (3 if uses_reward_model(config.reward_model) else 2) * slots + engines + judges + teachers + 1


def _enter(slurm: SlurmConfig, *, on_gpus: bool) -> str:
    """Return the script that sets up a task's environment, inside the container if any, and executes its arguments."""
    environment = (GPU_ENVIRONMENT if on_gpus else {}) | slurm.environment
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    arrived = [
        f'[[ -v {name} ]] || {{ echo "slurm.pass_environment: {name} does not reach this task"; exit 1; }}'
        for name in slurm.pass_environment
    ]
    return "\n".join(["set -eo pipefail", *arrived, *exports, *slurm.setup, 'exec "$@"'])


def _container(slurm: SlurmConfig, *, on_gpus: bool) -> str:
    """Return the container options between srun's options and the command. Mounts the working and run directories."""
    image, mounts = shlex.quote(slurm.container_image or ""), [shlex.quote(mount) for mount in slurm.container_mounts]
    if slurm.container == "pyxis":
        joined = ",".join(['"$PWD:$PWD"', '"$run_dir:$run_dir"', *mounts])
        # Without this option, variables that the image defines keep the image's value.
        names = f" --container-env={','.join(slurm.pass_environment)}" if slurm.pass_environment else ""
        return f'--container-image={image} --container-workdir="$PWD" --container-mounts={joined}{names}'
    if slurm.container == "apptainer":
        binds = " ".join(f"--bind {mount}" for mount in ['"$PWD"', '"$run_dir"', *mounts])
        return f'apptainer exec {"--nv " if on_gpus else ""}--pwd "$PWD" {binds} {image}'
    return ""
