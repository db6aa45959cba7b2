"""Checks that run in the first second of a command. Only cli and verbs import this module.

Nothing here imports torch, transformers, Megatron, an engine or Ray: each of these imports takes longer than all checks
of this module. `prepare` has the checks that need them.
"""

from __future__ import annotations

import re
from pathlib import Path

from mcore_rl.config import Config
from mcore_rl.config.algorithm import AlgorithmConfig, is_supervised
from mcore_rl.config.fields import make_paths_absolute
from mcore_rl.config.reward import JudgeConfig
from mcore_rl.config.rules.engine_support import cannot_run, missing_engine
from mcore_rl.config.rules.judge import server_key, template_text, uses_judge, validate_judge
from mcore_rl.config.rules.models import uses_reward_model
from mcore_rl.config.rules.validation import read_hf_config, validate, validate_reward_model
from mcore_rl.config.schema import ClusterConfig, DataConfig, ModelConfig, RolloutConfig
from mcore_rl.data.sources.paths import file_weights, find_files
from mcore_rl.errors import ConfigError
from mcore_rl.remote.storage import has_export
from mcore_rl.resolved.placement import place

DEVICES = Path("/dev")
GPU_FILES = ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu")
"""Device files of GPU drivers: NVIDIA, WSL, AMD, NVIDIA Jetson."""


def check_run(config: Config) -> None:
    """Check the configuration and this machine, make paths absolute, and read the judge's template.

    Other processes may have another working directory and no access to the template's file.

    Raises: ConfigError, DataError for the first setting that cannot work.
    """
    validate(config)
    validate_judge(config.judge, config.rollout, config.model)
    if uses_reward_model(config.reward_model) and not is_supervised(config.algorithm):
        validate_reward_model(config)
    # The search for a GPU imports torch, which is slow. Only judges depend on it.
    lacks = cannot_run(config, cuda=config.cluster.uses_cuda if config.judge.hf_path is not None else None)
    for problem in (*lacks, missing_engine(config.algorithm, config.rollout, config.judge)):
        if problem is not None:
            raise ConfigError(problem)
    # Only for the error: the key is read again when the server is called.
    server_key(config.judge)
    _check_cluster(config.cluster)
    _check_placement(config, 0 if is_supervised(config.algorithm) else config.rollout.num_engines)
    _check_data(config.data, config.algorithm)
    make_paths_absolute(config)
    if uses_judge(config.judge):
        config.judge.template = template_text(config.judge)


def check_update(config: Config) -> None:
    """Make the checks of `check_run` for an update without engines, data and models that score responses.

    Raises: ConfigError for the first setting that cannot work.
    """
    validate(config)
    _check_cluster(config.cluster)
    _check_placement(config, num_engines=0)
    make_paths_absolute(config)


def missing_files(
    data: DataConfig, algorithm: AlgorithmConfig, model: ModelConfig, judge: JudgeConfig, rollout: RolloutConfig
) -> list[str]:
    """Return one message for each of data, model and judge whose files are missing or invalid on this machine."""
    messages = []
    for check in (
        lambda: _check_data(data, algorithm),
        lambda: _check_model(model),
        lambda: validate_judge(judge, rollout, model),
    ):
        try:
            check()
        except ConfigError as error:
            messages.append(str(error))
    return messages


def has_gpu(devices: Path = DEVICES) -> bool:
    """Return True if a GPU driver has created device files. This check needs no library."""
    return any(any(devices.glob(pattern)) for pattern in GPU_FILES)


def _check_placement(config: Config, num_engines: int) -> None:
    """Place the processes, only for the errors: the run computes the placement again."""
    on_gpus = config.cluster.device == "cuda"
    place(config.cluster, config.rollout, config.num_trainer_ranks, on_gpus=on_gpus, num_engines=num_engines)


def _check_cluster(cluster: ClusterConfig) -> None:
    """Require the address of a cluster for several nodes, and a GPU on this machine unless the run joins a cluster,
    where other machines may have the GPUs."""
    if cluster.nodes > 1 and cluster.address is None:
        raise ConfigError(
            f"cluster.address must name the Ray cluster that offers cluster.nodes={cluster.nodes} nodes (a job "
            "of `mcore-rl slurm` sets it by itself); on one machine set cluster.nodes=1 and more cluster.gpus_per_node"
        )
    if cluster.device == "cuda" and cluster.address is None and not has_gpu():
        raise ConfigError(
            "cluster.device=cuda, but this machine has no GPU (there is no /dev/nvidia0); set cluster.device=cpu, or "
            "cluster.address to a Ray cluster that has GPUs"
        )


def check_outputs(config: Config) -> None:
    """Require that the exports of an unfinished run do not exist, that their URLs and checkpoint.copy_to can be read,
    and that this run owns the copies of checkpoints there.

    Raises: ConfigError naming the key.
    """
    trainer, copy_to = config.trainer, config.checkpoint.copy_to
    if copy_to is not None:
        from mcore_rl.trainer.copies import check_copies

        check_copies(copy_to, Path(config.run.dir) / "checkpoints")
    for key in ("export_hf", "export_adapter"):
        target = getattr(trainer, key)
        if target is not None and has_export(f"trainer.{key}", target):
            raise ConfigError(f"trainer.{key}={target} exists already; remove it or name another directory")


def _check_model(model: ModelConfig) -> None:
    """Require that files of weights and tokenizer exist. Their contents are checked when a run starts."""
    directory = Path(model.hf_path)
    read_hf_config(model)
    if not model.random_init and not any(directory.glob("*.safetensors")):
        raise ConfigError(f"model.hf_path={directory}: no safetensors there; set it to a directory with the weights")
    if model.tokenizer_path is not None and not Path(model.tokenizer_path).exists():
        raise ConfigError(f"model.tokenizer_path={model.tokenizer_path} does not exist")


def _check_data(data: DataConfig, algorithm: AlgorithmConfig) -> None:
    """Require existing data files of a known format, and valid set names and weights. Reads no rows."""
    find_files(data.train, "data.train")
    if data.val_sets is not None and not data.val_sets:
        raise ConfigError("data.val is an empty mapping; set it to {name: path}, to a path, or to null")
    for name in data.val_sets or ():
        # Names of sets are the last part of metric names.
        if re.fullmatch(r"[\w.-]{1,100}", name) is None:
            raise ConfigError(
                f"data.val: {name!r} cannot name a set, as metrics end with it (val/accuracy/<name>); use letters, "
                "digits, _, - and ."
            )
    for key, names in data.validation.items():
        # A supervised run reads no validation prompts.
        if not is_supervised(algorithm):
            find_files(names, key)
    if data.weights and data.curriculum is not None:
        raise ConfigError(
            "data.weights has no effect with data.curriculum, whose function determines how often a row is sampled: it"
            " may return an index more than once; set one of the two"
        )
    file_weights(data.weights, data.train)
